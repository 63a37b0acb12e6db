// Dot products in the arithmetics of samebits/arithmetic: fma32, sm90, cdna3.
//
// Sixteen outputs of one row at a time: the columns of b are decoded into a tile [k][16] of significands, exponents and
// "kinds" (what infinities and NaN do), and each row of a runs against it. The lanes are compiler vectors as wide as
// the instruction set has them; every operation is exact or a bit operation, so all widths give the same bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "pool.h"
#include "vec.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // the vectors never cross a boundary between instruction sets

namespace samebits {
namespace SAMEBITS_ISA {
#include "arithmetic.inc"

namespace {

#if defined(SAMEBITS_ISA_avx512)
constexpr int kWidth = 16;
#elif defined(SAMEBITS_ISA_avx2)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));

constexpr int kDepth = 256;        // k per tile, a multiple of every group
constexpr int kRows = 64;          // rows of a per task
constexpr int kNoExponent = -1000;  // of a zero factor: below that of every product

template <class V, class T> V all(T x) { return V{} + x; }
template <class V, class T> V load(const T* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class To, class From> To as(From x) { To y; std::memcpy(&y, &x, sizeof y); return y; }
inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }
inline Ints to_ints(Floats x) { return __builtin_convertvector(x, Ints); }  // toward zero
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Floats power_of_two(Ints n) { return as<Floats>((n + 127) << 23); }

// A bf16 value: sign and significand in (-2, 2), exponent of the encoding, and kind: itself when it is an infinity
// or NaN (whose significand is then 0), otherwise its sign.
struct Factor {
  float significand;
  int32_t exponent;
  float kind;
};
inline Factor decode(uint16_t h) {
  uint32_t u = static_cast<uint32_t>(h) << 16, rest = u & 0x7fffffffu;
  int32_t field = static_cast<int32_t>(rest >> 23);
  float one = bits_to_float((u & 0x80000000u) | 0x3f800000u);
  float normal = bits_to_float((u & 0x807fffffu) | 0x3f800000u);
  float subnormal = one * (static_cast<float>(static_cast<int32_t>(h & 0x7f)) * 0x1p-7f);
  bool none = rest == 0 || field == 255;
  Factor f;
  f.significand = none ? 0.0f : field == 0 ? subnormal : normal;
  f.exponent = none ? kNoExponent : field == 0 ? -126 : field - 127;
  f.kind = field == 255 ? bits_to_float(u) : rest == 0 ? 0.0f : one;
  return f;
}

// Up to kDepth consecutive k of `kColumns` rows of a matrix, k-major; missing values are zeros.
template <int kColumns> struct Tile {
  alignas(64) float significand[kDepth * kColumns];
  alignas(64) int32_t exponent[kDepth * kColumns];
  alignas(64) float kind[kDepth * kColumns];
  bool finite;
  int32_t largest;  // exponent

  void fill(const uint16_t* rows, int64_t stride, int64_t count, int64_t depth, int64_t padded) {
    int32_t special = 0;
    largest = kNoExponent;
    for (int64_t c = 0; c < kColumns; ++c) {
      int64_t known = c < count ? depth : 0;
      for (int64_t k = 0; k < known; ++k) {
        uint16_t h = rows[c * stride + k];
        Factor f = decode(h);
        significand[k * kColumns + c] = f.significand;
        exponent[k * kColumns + c] = f.exponent;
        kind[k * kColumns + c] = f.kind;
        special |= (h & 0x7f80) == 0x7f80;
        largest = std::max(largest, f.exponent);
      }
      for (int64_t k = known; k < padded; ++k) {
        significand[k * kColumns + c] = kind[k * kColumns + c] = 0.0f;
        exponent[k * kColumns + c] = kNoExponent;
      }
    }
    finite = special == 0;
  }
};
using Row = Tile<1>;
using Columns = Tile<kLanes>;

// fp32 accumulators in parts: magnitude * 2^(exponent - 23), and the sign as a mask.
struct Start {
  Ints magnitude, exponent, negative;
  explicit Start(Floats acc, int32_t zero_exponent) {
    Ints bits = as<Ints>(acc), field = (bits >> 23) & 0xff;
    negative = bits >> 31;
    magnitude = (bits & 0x7fffff) | ((field > 0) & 0x800000);
    exponent = larger(field, all<Ints>(1)) - 127;
    exponent = magnitude == 0 ? all<Ints>(zero_exponent) : exponent;
  }
};

// The largest of `top` and the exponents of the products of group `k`; zero products count as kZero, if that is given.
template <int kGroup, int kZero> Ints largest_exponent(const Row& a, const Columns& b, int64_t k, int lane, Ints top) {
  for (int i = 0; i < kGroup; ++i) {
    Ints e = load<Ints>(b.exponent + (k + i) * kLanes + lane) + a.exponent[k + i];
    if (kZero != 0) e = e < kNoExponent / 2 ? all<Ints>(kZero) : e;
    top = larger(top, e);
  }
  return top;
}

// The products of group `k`, each cut off at `fraction` bits below 2^top, added as integers.
template <int kGroup, int kFraction> Ints aligned_sum(const Row& a, const Columns& b, int64_t k, int lane, Ints top) {
  Ints sum{}, base = top - (kFraction + 127);
  for (int i = 0; i < kGroup; ++i) {
    Floats product = load<Floats>(b.significand + (k + i) * kLanes + lane) * a.significand[k + i];
    Ints field = load<Ints>(b.exponent + (k + i) * kLanes + lane) + (a.exponent[k + i] - base);
    // a field of 0 makes the scale 0: such a product lies far below the last fraction bit
    sum += to_ints(product * as<Floats>(larger(field, Ints{}) << 23));
  }
  return sum;
}

// What infinities and NaN among the factors add up to; finite when there are none. With `limited`, products of
// 2^128 and more are infinities too.
template <int kGroup> Floats kinds(const Row& a, const Columns& b, int64_t k, int lane, bool limited) {
  Floats sum{};
  for (int i = 0; i < kGroup; ++i) {
    Floats kind = load<Floats>(b.kind + (k + i) * kLanes + lane) * a.kind[k + i];
    if (limited) {
      Floats product = load<Floats>(b.significand + (k + i) * kLanes + lane) * a.significand[k + i];
      Ints exponent = load<Ints>(b.exponent + (k + i) * kLanes + lane) + a.exponent[k + i];
      Ints wide = (product >= 2.0f) | (product <= -2.0f);
      Ints over = (exponent - wide) >= 128;
      kind = over ? kind * all<Floats>(INFINITY) : kind;
    }
    sum += kind;
  }
  return sum;
}

inline Floats with_specials(Floats finite, Floats acc, Floats kind, uint32_t nan) {
  Ints whole = (as<Ints>(acc) & 0x7f800000) == 0x7f800000;
  kind += whole ? acc : Floats{};
  Ints bits = as<Ints>(kind) & 0x7fffffff;
  Floats out = bits >= 0x7f800000 ? kind : finite;
  return bits > 0x7f800000 ? as<Floats>(all<Ints>(static_cast<int32_t>(nan))) : out;
}

struct Sm90 {
  static constexpr int kGroup = 16, kFraction = 25;
  static Floats step(const Row& a, const Columns& b, int64_t k, int lane, Floats acc) {
    Start start(acc, -133);
    Ints top = largest_exponent<kGroup, 0>(a, b, k, lane, start.exponent);
    Ints sum = aligned_sum<kGroup, kFraction>(a, b, k, lane, top);
    Ints away = top - start.exponent;
    Ints from = (start.magnitude << 2) >> (away > 31 ? all<Ints>(31) : away);
    from = (from ^ start.negative) - start.negative;
    Floats finite = round_toward_zero(sum, from, top);
    bool plain = a.finite && b.finite;
    return with_specials(finite, acc, plain ? Floats{} : kinds<kGroup>(a, b, k, lane, false), 0x7fffffffu);
  }

  // (sum + from) * 2^(top - 25); the sum may need 33 bits with its sign, so the sign is found before adding.
  static Floats round_toward_zero(Ints sum, Ints from, Ints top) {
    Words total = as<Words>(sum) + as<Words>(from);
    Ints negative = ((sum & from) | ((sum ^ from) & as<Ints>(total))) >> 31;
    Words magnitude = (total ^ as<Words>(negative)) - as<Words>(negative);
    Words low = magnitude >> 24;
    low |= low >> 1;
    low |= low >> 2;
    low |= low >> 4;
    magnitude &= ~low;  // the leading 24 bits are left
    Words drop = as<Words>(larger(-124 - top, Ints{}));
    magnitude = (magnitude >> drop) << drop;  // nothing below 2^-149
    Floats value = to_floats(as<Ints>(magnitude >> 8)) * 256.0f + to_floats(as<Ints>(magnitude & 255));
    Ints unit = top - kFraction, half = unit >> 1;
    value = value * power_of_two(half) * power_of_two(unit - half);
    Ints sign = negative & as<Ints>(magnitude != 0) & static_cast<int32_t>(0x80000000u);
    return as<Floats>(as<Ints>(value) | sign);
  }
};

struct Cdna3 {
  static constexpr int kGroup = 8, kFraction = 24;
  static Floats step(const Row& a, const Columns& b, int64_t k, int lane, Floats acc) {
    Start start(acc, -126);
    Ints peak = largest_exponent<kGroup, -126>(a, b, k, lane, all<Ints>(2 * kNoExponent));
    Ints sum = aligned_sum<kGroup, kFraction>(a, b, k, lane, peak);
    Ints top = larger(peak, start.exponent), away = top - start.exponent;
    Ints from = (start.magnitude << 1 ^ start.negative) - start.negative;
    from = from >> (away > 31 ? all<Ints>(31) : away);  // rounded down
    Floats finite;
    for (int i = 0; i < kWidth; ++i) {
      int64_t products = (static_cast<int64_t>(sum[i]) << 7) >> std::min(top[i] - peak[i], 63);  // rounded down
      double total = static_cast<double>(products + (static_cast<int64_t>(from[i]) << 7));
      int64_t unit = static_cast<int64_t>(top[i] - 31 + 1023) << 52;
      double scale;
      std::memcpy(&scale, &unit, sizeof scale);
      finite[i] = static_cast<float>(total * scale);
    }
    bool limited = a.largest + b.largest >= 127, plain = a.finite && b.finite && !limited;
    return with_specials(finite, acc, plain ? Floats{} : kinds<kGroup>(a, b, k, lane, limited), 0x7fc00000u);
  }
};

template <class Arithmetic>
void run_row(const Row& a, const Columns& b, int64_t depth, float* acc) {
  for (int lane = 0; lane < kLanes; lane += kWidth) {
    Floats total = load<Floats>(acc + lane);
    for (int64_t k = 0; k < depth; k += Arithmetic::kGroup) total = Arithmetic::step(a, b, k, lane, total);
    std::memcpy(acc + lane, &total, sizeof total);
  }
}

// Calls body(first row, last row, first column) over blocks of kRows x 16 outputs.
template <class Body> void each_block(int64_t rows, int64_t columns, Body body) {
  int64_t across = (columns + kLanes - 1) / kLanes, down = (rows + kRows - 1) / kRows;
  parallel_for(across * down, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      body(t % down * kRows, std::min(rows, (t % down + 1) * kRows), t / down * kLanes);
  });
}

template <class Arithmetic>
void dot(const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t b_stride, float* out, int64_t rows,
         int64_t columns, int64_t depth) {
  each_block(rows, columns, [&](int64_t first, int64_t last, int64_t column) {
    auto row = std::make_unique<Row>();
    auto tile = std::make_unique<Columns>();
    int64_t count = std::min<int64_t>(columns - column, kLanes);
    for (int64_t k = 0; k < depth; k += kDepth) {
      int64_t part = std::min<int64_t>(depth - k, kDepth);
      int64_t padded = (part + Arithmetic::kGroup - 1) / Arithmetic::kGroup * Arithmetic::kGroup;
      tile->fill(b + column * b_stride + k, b_stride, count, part, padded);
      for (int64_t m = first; m < last; ++m) {
        row->fill(a + m * a_stride + k, a_stride, 1, part, padded);
        alignas(64) float acc[kLanes] = {};
        std::copy_n(out + m * columns + column, count, acc);
        run_row<Arithmetic>(*row, *tile, padded, acc);
        std::copy_n(acc, count, out + m * columns + column);
      }
    }
  });
}

// fma32: four rows share each column vector; every output is one chain over k.
void dot_fma32(const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t b_stride, float* out, int64_t rows,
               int64_t columns, int64_t depth) {
  constexpr int kTogether = 4;
  each_block(rows, columns, [&](int64_t first, int64_t last, int64_t column) {
    alignas(64) float tile[kDepth * kLanes];
    int count = static_cast<int>(std::min<int64_t>(columns - column, kLanes));
    for (int64_t k = 0; k < depth; k += kDepth) {
      int64_t part = std::min<int64_t>(depth - k, kDepth);
      for (int c = 0; c < kLanes; ++c)
        for (int64_t i = 0; i < part; ++i)
          tile[i * kLanes + c] = c < count ? bf16_to_float(b[(column + c) * b_stride + k + i]) : 0.0f;
      for (int64_t m = first; m < last; m += kTogether) {
        const uint16_t* row[kTogether];
        float* to[kTogether];
        F32x16 acc[kTogether];
        for (int r = 0; r < kTogether; ++r) {
          int64_t at = std::min(m + r, last - 1);  // a repeated last row is computed twice, equally
          row[r] = a + at * a_stride + k;
          to[r] = out + at * columns + column;
          acc[r] = load_part(to[r], count);
        }
        for (int64_t i = 0; i < part; ++i) {
          F32x16 v = F32x16::load(tile + i * kLanes);
          for (int r = 0; r < kTogether; ++r) acc[r] = fma(F32x16::all(bf16_to_float(row[r][i])), v, acc[r]);
        }
        for (int r = 0; r < kTogether; ++r) store_part(acc[r], to[r], count);
      }
    }
  });
}

}  // namespace

void arithmetic_dot(int arithmetic, const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t b_stride,
                    float* out, int64_t rows, int64_t columns, int64_t depth) {
  auto run = arithmetic == 0 ? dot_fma32 : arithmetic == 1 ? dot<Sm90> : dot<Cdna3>;
  run(a, a_stride, b, b_stride, out, rows, columns, depth);
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
