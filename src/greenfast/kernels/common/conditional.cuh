// std::conditional_t. The one of libcu++ (<cuda/std/type_traits>) makes a compile five times as long.
#pragma once

namespace greenfast {

template <bool kFirst, class First, class Second>
struct Conditional {
  using type = First;
};

template <class First, class Second>
struct Conditional<false, First, Second> {
  using type = Second;
};

template <bool kFirst, class First, class Second>
using conditional_t = typename Conditional<kFirst, First, Second>::type;

}  // namespace greenfast
