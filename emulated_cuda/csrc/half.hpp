// Numbers of 16 and 8 bits, and their conversion to and from single precision: to the nearest. What is too
// large becomes infinite in 16 bits, and the largest finite number in 8, as CUDA converts to float8.
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
struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
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
inline float wide(E5m2 value) { return wide(Half{(uint16_t)(value.bits << 8)}); }
inline float wide(E4m3 value) {
  int exponent = value.bits >> 3 & 15, mantissa = value.bits & 7;
  float size = exponent ? std::ldexp((float)(8 + mantissa), exponent - 10) : std::ldexp((float)mantissa, -9);
  if (exponent == 15 && mantissa == 7) size = NAN;
  return value.bits & 128 ? -size : size;
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

// `digits` of a number's fraction are kept; `bias` is that of the exponent.
inline uint8_t narrow_to_8(float value, int digits, int bias, int largest) {
  uint8_t sign = std::signbit(value) ? 128 : 0;
  float size = std::fabs(value);
  if (value != value) return sign | 127;
  if (size == 0) return sign;
  if (size > 1e6f) return sign | largest;
  int exponent = 0;
  std::frexp(size, &exponent);
  if (exponent < 2 - bias) exponent = 2 - bias;  // smaller ones are subnormal
  int mantissa = (int)std::nearbyint(std::ldexp(size, digits + 1 - exponent));
  int bits = ((exponent + bias - 2) << digits) + mantissa;
  return sign | (uint8_t)(bits < largest ? bits : largest);
}
template <>
inline E4m3 narrow<E4m3, float>(float value) {
  return {narrow_to_8(value, 3, 7, 0x7e)};
}
template <>
inline E5m2 narrow<E5m2, float>(float value) {
  return {narrow_to_8(value, 2, 15, 0x7b)};
}
