// Makes the names of cuda::std known as std's, for sources written for a host's standard library.
#pragma once
namespace cuda {
namespace std {}
}  // namespace cuda
namespace std {
using namespace ::cuda::std;
}
