// What the kernels share: bf16 and int8 vectors, packing of operands, and the tile that multiplies.
//
// A product C[M, N] += A[M, K] B[K, N] is done in tiles of MR rows × NV vectors of 16 columns, whose sums stay in
// registers.  Both dot instructions (vdpbf16ps: 2 bf16, vpdpbusd: 4 bytes) consume one 32-bit word of A, the same for
// all lanes, and one word of B in each lane.  So everything is addressed in words along K: a word of A is read where it
// lies (any strides), B is packed beforehand into panels [K words][16 NV].
//
// The instructions are written in assembly because gcc 12 spills the accumulators of the intrinsics.
#pragma once
#include <immintrin.h>
#include <omp.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;
using bf16 = uint16_t;

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Memory of one thread that is kept from call to call and only grows; 64-byte aligned.
struct Scratch {
    char* at = nullptr;
    int64_t size = 0;
    ~Scratch() { std::free(at); }
    void* get(int64_t bytes) {
        if (bytes > size) {
            std::free(at);
            size = up(bytes + bytes / 4, 4096);
            at = static_cast<char*>(std::aligned_alloc(64, size));
            if (at == nullptr) std::abort();
        }
        return at;
    }
};

INLINE __m512 from_bf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
INLINE __mmask16 first(int64_t n) { return n >= 16 ? 0xFFFF : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
INLINE __m512 load_bf16(const bf16* p, __mmask16 m = 0xFFFF) { return from_bf16(_mm256_maskz_loadu_epi16(m, p)); }
INLINE void store_bf16(bf16* p, __m512 x, __mmask16 m = 0xFFFF) { _mm256_mask_storeu_epi16(p, m, to_bf16(x)); }

// e^x to 2 ulp; 0 below -87 and at -inf.
INLINE __m512 exp512(__m512 x) {
    const __mmask16 live = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_maskz_scalef_ps(live, p, n);
}

struct Bf16Dot {
    using Sum = __m512;
    INLINE Sum zero() { return _mm512_setzero_ps(); }
    INLINE void dot(Sum& c, __m512i a, __m512i b) { asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b)); }
};
struct Int8Dot {  // A unsigned, B signed
    using Sum = __m512i;
    INLINE Sum zero() { return _mm512_setzero_si512(); }
    INLINE void dot(Sum& c, __m512i a, __m512i b) { asm("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(a), "v"(b)); }
};

// c += A B over `steps` words.  a: first word of the first row; rs, ks: bytes to the next row and to the next word.
template <class Dot, int MR, int NV>
INLINE void multiply(typename Dot::Sum (&c)[MR][NV], const char* a, int64_t rs, int64_t ks, const uint32_t* b,
                     int64_t steps) {
    for (int64_t k = 0; k < steps; ++k) {
        __m512i bv[NV];
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) bv[j] = _mm512_load_si512(b + j * 16);
        const char* row = a;
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r, row += rs) {
            int word;
            std::memcpy(&word, row, 4);
            const __m512i av = _mm512_set1_epi32(word);
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) Dot::dot(c[r][j], av, bv[j]);
        }
        a += ks;
        b += NV * 16;
    }
}

// 16 × 16 words: rows of `in` (bytes apart: `stride`) become columns.  rows, words: what exists, the rest is zero.
INLINE void transpose16(const char* in, int64_t stride, int64_t rows, int64_t words, uint32_t* out, int64_t out_stride) {
    __m512i r[16], t[16];
    const __mmask16 m = first(words);
    for (int i = 0; i < 16; ++i)
        r[i] = i < rows ? _mm512_maskz_loadu_epi32(m, in + i * stride) : _mm512_setzero_si512();
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; ++h) {
            r[i + 2 * h] = _mm512_unpacklo_epi64(t[i + h], t[i + h + 2]);
            r[i + 2 * h + 1] = _mm512_unpackhi_epi64(t[i + h], t[i + h + 2]);
        }
    // r[4 g + w]: word 4 l + w of rows 4 g .. 4 g + 3 in 128-bit lane l
    for (int w = 0; w < 4; ++w) {
        const __m512i ab = _mm512_shuffle_i32x4(r[w], r[4 + w], 0x88), AB = _mm512_shuffle_i32x4(r[w], r[4 + w], 0xdd);
        const __m512i cd = _mm512_shuffle_i32x4(r[8 + w], r[12 + w], 0x88);
        const __m512i CD = _mm512_shuffle_i32x4(r[8 + w], r[12 + w], 0xdd);
        t[w] = _mm512_shuffle_i32x4(ab, cd, 0x88);
        t[8 + w] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
        t[4 + w] = _mm512_shuffle_i32x4(AB, CD, 0x88);
        t[12 + w] = _mm512_shuffle_i32x4(AB, CD, 0xdd);
    }
    for (int w = 0; w < 16; ++w)
        if (w < words) _mm512_store_si512(out + w * out_stride, t[w]);
}

// Panel of B = Xᵀ, X [rows, ·] read in words: out[word][width], column n is row n of X.  width: a multiple of 16.
INLINE void pack_rows(const char* x, int64_t stride, int64_t rows, int64_t words, int width, uint32_t* out) {
    for (int64_t w = 0; w < words; w += 16)
        for (int n = 0; n < width; n += 16)
            transpose16(x + n * stride + 4 * w, stride, rows - n, min64(16, words - w), out + w * width + n, width);
}

// Words of two bf16 rows: lane n is (a[n], b[n]).
INLINE __m512i pair(__m256i a, __m256i b) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

// Panel of B = X, X [rows, ·] of bf16: out[rows / 2][width], word (X[2 k][n], X[2 k + 1][n]).  cols: what exists.
INLINE void pack_pairs(const bf16* x, int64_t stride, int64_t rows, int64_t cols, int width, uint32_t* out) {
    for (int64_t k = 0; k < rows; k += 2, out += width)
        for (int n = 0; n < width; n += 16) {
            const __mmask16 m = first(cols - n);
            const bf16* p = x + k * stride + n;
            const __m256i a = _mm256_maskz_loadu_epi16(m, p);
            const __m256i b = k + 1 < rows ? _mm256_maskz_loadu_epi16(m, p + stride) : _mm256_setzero_si256();
            _mm512_store_si512(out + n, pair(a, b));
        }
}
