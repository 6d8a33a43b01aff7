// Numbers of 16 bits, and their conversion to and from single precision.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};
inline float wide(Half value) {
  uint32_t sign = (uint32_t)(value.bits & 0x8000) << 16, exponent = value.bits >> 10 & 31, mantissa = value.bits & 1023;
  uint32_t bits;
  if (exponent == 31) bits = sign | 0x7f800000 | mantissa << 13;
  else if (exponent) bits = sign | (exponent + 112) << 23 | mantissa << 13;
  else {
    float small = std::ldexp((float)mantissa, -24);
    return sign ? -small : small;
  }
  float found;
  memcpy(&found, &bits, sizeof found);
  return found;
}
inline float wide(Bfloat value) {
  uint32_t bits = (uint32_t)value.bits << 16;
  float found;
  memcpy(&found, &bits, sizeof found);
  return found;
}
template <class T>
T wide(T value) {
  return value;
}
template <class T, class W>
T narrow(W value) {
  return (T)value;
}
template <>
inline Half narrow<Half, float>(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint16_t sign = bits >> 16 & 0x8000;
  float size = std::fabs(value);
  if (value != value) return {0x7e00};
  if (size >= 65520) return {(uint16_t)(sign | 0x7c00)};
  if (size < 6.103515625e-5f)  // 2^-14: subnormal
    return {(uint16_t)(sign | (uint16_t)std::nearbyint(std::ldexp(size, 24)))};
  int exponent = 0;
  std::frexp(size, &exponent);  // size = m * 2^exponent, 0.5 <= m < 1
  auto mantissa = (uint32_t)std::nearbyint(std::ldexp(size, 11 - exponent));  // 11 bits, even on a tie
  return {(uint16_t)(sign + ((uint32_t)(exponent + 13) << 10) + mantissa)};
}
template <>
inline Bfloat narrow<Bfloat, float>(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return {0x7fc0};
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
