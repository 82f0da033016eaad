#pragma once
// These are words of C++.
