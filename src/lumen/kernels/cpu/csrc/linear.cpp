// A linear layer with a LoRA branch, forward and backward, in bf16; its input gradient also through int8.
//
//     h = x Aᵀ,  y = x Wᵀ + h Bᵀ          x [M, K], W [N, K], A [R, K], B [N, R] (scaled), R even
//     dh = dy B,  dx = dy W + dh A,  dA = dhᵀ x,  dB = dyᵀ h
//
// The branch is a longer contraction: [x | h] [W | B]ᵀ and [dy | dh] [W ; A].  Its words are multiplied into the same
// registers before they are rounded and stored, so it costs R / K more and no pass over memory.
//
// Weights are packed into panels of 48 columns inside the call, some megabytes at a time: N K words of copying against
// M N K products, and no second copy of the model.  Frozen int8 codes are packed once, by lumen_pack_int8.
//
// int8: dy is quantised by rows (scale = amax / 127, nearest even) and stored unsigned, code + 128, as vpdpbusd wants;
// 128 times the sum of each column of codes is taken off again.
#include "tiles.h"

#include <cmath>

namespace {

char* shared_memory(int64_t bytes) {
    static thread_local Scratch memory;  // of the thread that calls; the team only reads and fills it
    return static_cast<char*>(memory.get(bytes));
}
uint32_t* own_memory(int64_t bytes) {
    static thread_local Scratch memory;
    return static_cast<uint32_t*>(memory.get(bytes));
}

template <int R, int V>
void thin_tile(const char* a, int64_t stride, const uint32_t* b, int64_t words, float* out) {
    __m512 sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) sum[r][j] = _mm512_setzero_ps();
    multiply<Bf16Dot, R, V>(sum, a, stride, 4, b, words);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) _mm512_store_ps(out + (r * V + j) * 16, sum[r][j]);
}

// Up to 8 rows of X [·, words] times B packed in panels of 16 columns → out [rows, R] bf16
void thin(const char* x, int64_t stride, int64_t rows, const uint32_t* b, int64_t words, int64_t R, bf16* out) {
    static constexpr void (*T[9])(const char*, int64_t, const uint32_t*, int64_t, float*) = {
        nullptr, thin_tile<1, 1>, thin_tile<2, 1>, thin_tile<3, 1>, thin_tile<4, 1>,
        thin_tile<5, 1>, thin_tile<6, 1>, thin_tile<7, 1>, thin_tile<8, 1>};
    alignas(64) float sums[8 * 16];
    for (int64_t c = 0; c < R; c += 16) {
        T[rows](x, stride, b + c * words, words, sums);
        for (int64_t r = 0; r < rows; ++r) store_bf16(out + r * R + c, _mm512_load_ps(sums + 16 * r), first(R - c));
    }
}

// out [R, C] fp32 = scale · Lᵀ X over M rows; L [M, R], X [M, C] bf16; called by every thread of a team.
// pairs: L's rows two by two, words [M / 2][R]
template <int R>
void outer_tile(const uint32_t* pairs, int64_t ks, const uint32_t* panel, int64_t words, float* out, int64_t stride,
                float scale, int64_t columns, bool add) {
    __m512 sum[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) sum[r][j] = _mm512_setzero_ps();
    multiply<Bf16Dot, R, NV>(sum, (const char*)pairs, 4, ks, panel, words);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) {
            const __mmask16 m = first(columns - 16 * j);
            float* at = out + r * stride + 16 * j;
            __m512 x = _mm512_mul_ps(sum[r][j], _mm512_set1_ps(scale));
            if (add) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(m, at));
            _mm512_mask_storeu_ps(at, m, x);
        }
}
void outer(const uint32_t* pairs, int64_t R, const bf16* x, int64_t rows, int64_t columns, float scale, float* out) {
    static constexpr void (*T[9])(const uint32_t*, int64_t, const uint32_t*, int64_t, float*, int64_t, float, int64_t,
                                  bool) = {nullptr, outer_tile<1>, outer_tile<2>, outer_tile<3>, outer_tile<4>,
                                           outer_tile<5>, outer_tile<6>, outer_tile<7>, outer_tile<8>};
    constexpr int64_t DEPTH = 512, WIDE = 4;  // rows and panels packed at a time: 192 kB, long pieces of each row
    uint32_t* packed = own_memory(DEPTH / 2 * PW * 4 * WIDE);
#pragma omp for schedule(dynamic)
    for (int64_t c = 0; c < columns; c += WIDE * PW)
        for (int64_t m = 0; m < rows; m += DEPTH) {
            const int64_t depth = min64(DEPTH, rows - m), words = (depth + 1) / 2, end = min64(columns, c + WIDE * PW);
            for (int64_t k = 0; k < words; ++k)
                for (int64_t p = c; p < end; p += PW)
                    pack_pairs(x + (m + 2 * k) * columns + p, columns, min64(2, depth - 2 * k), columns - p, PW,
                               packed + ((p - c) / PW * words + k) * PW);
            for (int64_t p = c; p < end; p += PW)
                for (int64_t r = 0; r < R; r += 8)
                    T[min64(8, R - r)](pairs + m / 2 * R + r, 4 * R, packed + (p - c) * words, words,
                                       out + r * columns + p, columns, scale, columns - p, m > 0);
        }
}

void interleave(const bf16* x, int64_t rows, int64_t R, uint32_t* out) {
#pragma omp for
    for (int64_t m = 0; m < (rows + 1) / 2; ++m)
        for (int64_t r = 0; r < R; ++r)
            out[m * R + r] = x[2 * m * R + r] | (2 * m + 1 < rows ? (uint32_t)x[(2 * m + 1) * R + r] << 16 : 0);
}

// One row → codes + 128 (padded with 128 to whole words); returns the scale
float quantise_row(const bf16* x, int64_t n, uint8_t* out) {
    __m512i top = _mm512_setzero_si512();  // magnitudes of bf16 order as integers, NaN above all
    for (int64_t i = 0; i < n; i += 32) {
        const __mmask32 m = n - i >= 32 ? 0xFFFFFFFFu : (1u << (n - i)) - 1;
        top = _mm512_max_epu16(top, _mm512_and_si512(_mm512_maskz_loadu_epi16(m, x + i), _mm512_set1_epi16(0x7FFF)));
    }
    alignas(64) uint16_t all[32];
    _mm512_store_si512(all, top);
    uint16_t best = 0;
    for (uint16_t v : all) best = v > best ? v : best;
    const uint32_t bits = (uint32_t)best << 16;
    float amax;
    std::memcpy(&amax, &bits, 4);
    float scale = amax / 127.0f;
    if (!(amax < INFINITY)) scale = NAN;
    if (scale < 1.17549435e-38f) scale = 1.0f;  // a zero row, or one too small for a scale
    const __m512 divisor = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < up(n, 4); i += 16) {
        const __m512i code = _mm512_cvtps_epi32(_mm512_div_ps(load_bf16(x + i, first(n - i)), divisor));
        const __m128i bytes = _mm_xor_si128(_mm512_cvtsepi32_epi8(code), _mm_set1_epi8((char)0x80));
        _mm_mask_storeu_epi8(out + i, first(up(n, 4) - i), bytes);
    }
    return scale;
}

void round_to(const float* x, int64_t rows, int64_t cols, int64_t out_cols, float scale, bf16* out) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < out_cols; c += 16) {
            const __m512 v = _mm512_maskz_loadu_ps(first(cols - c), x + r * cols + c);
            store_bf16(out + r * out_cols + c, _mm512_mul_ps(v, _mm512_set1_ps(scale)), first(out_cols - c));
        }
}

struct Sizes {
    int64_t M, N, K, R, E;  // E: R made even
    explicit Sizes(const int64_t* n) : M(n[0]), N(n[1]), K(n[2]), R(n[3]), E(up(n[3], 2)) {}
};

}  // namespace

// x [M, K], w [N, K] bf16 (K even); a [R, K], b [N, R] fp32 → y [M, N], h [M, E] bf16.  R may be 0.
EXPORT void lumen_lora_forward(const bf16* x, const bf16* w, const float* a, const float* b, bf16* y, bf16* h,
                               const int64_t* sizes, float scale) {
    const Sizes s(sizes);
    const int64_t words = s.K / 2 + s.E / 2, num = (s.N + PW - 1) / PW, group = min64(num, group_of(words));
    const int64_t wide = up(s.E, 16);
    Carve memory{shared_memory(group * words * PW * 4 + wide * s.K * 2 + s.E * s.K * 2 + s.N * s.E * 2 + 1024)};
    uint32_t* packed = memory.take<uint32_t>(group * words * PW);
    uint32_t* packed_a = memory.take<uint32_t>(wide * s.K / 2);
    bf16 *a16 = memory.take<bf16>(s.E * s.K), *b16 = memory.take<bf16>(s.N * s.E);
    if (s.R) {
        round_to(a, s.R, s.K, s.K, 1.0f, a16);
        round_to(b, s.N, s.R, s.E, scale, b16);
        for (int64_t c = 0; c < wide; c += 16)
            pack_rows((const char*)(a16 + c * s.K), 2 * s.K, s.R - c, s.K / 2, 16, packed_a + c * s.K / 2);
    }
#pragma omp parallel
    {
        if (s.R) {
#pragma omp for
            for (int64_t m = 0; m < s.M; m += MR)
                thin((const char*)(x + m * s.K), 2 * s.K, min64(MR, s.M - m), packed_a, s.K / 2, s.E, h + m * s.E);
        }
        for (int64_t g = 0; g < num; g += group) {
            const int64_t to = min64(num, g + group);
#pragma omp for schedule(dynamic)
            for (int64_t p = g; p < to; ++p) {
                uint32_t* out = packed + (p - g) * words * PW;
                pack_rows((const char*)(w + p * PW * s.K), 2 * s.K, s.N - p * PW, s.K / 2, PW, out);
                if (s.E) pack_rows((const char*)(b16 + p * PW * s.E), 2 * s.E, s.N - p * PW, s.E / 2, PW, out + s.K / 2 * PW);
            }
            panels({(const char*)x, 2 * s.K, s.K / 2}, {(const char*)h, 2 * s.E, s.E / 2}, packed, g, to, s.M, nullptr, y, s.N,
                   s.N);
        }
    }
}

// dy [M, N], x [M, K], h [M, E], w [N, K] bf16 (N even) or codes packed by lumen_pack_int8 with their scale and offset
// [up(K, 48)]; a, b fp32 → dx [M, K] bf16, da [R, K], db [R, N] fp32.
EXPORT void lumen_lora_backward(const bf16* dy, const bf16* x, const bf16* h, const bf16* w, const uint32_t* codes,
                                const float* code_scale, const int* code_offset, const float* a, const float* b,
                                bf16* dx, float* da, float* db, const int64_t* sizes, float scale) {
    const Sizes s(sizes);
    const bool quant = codes != nullptr;
    const int64_t first_words = quant ? (s.N + 3) / 4 : s.N / 2, words = first_words + s.E / 2;
    const int64_t num = (s.K + PW - 1) / PW, group = min64(num, group_of(words)), wide = up(s.E, 16);
    const int64_t half = (s.M + 1) / 2, code_stride = first_words * 4;
    Carve memory{shared_memory(group * words * PW * 4 + wide * s.N * 2 + s.E * s.K * 2 + s.N * s.E * 2 + s.M * s.E * 2 +
                               2 * half * s.E * 4 + (quant ? s.M * (code_stride + 4) + 64 : 0) + 4096)};
    uint32_t* packed = memory.take<uint32_t>(group * words * PW);
    uint32_t* packed_b = memory.take<uint32_t>(wide * s.N / 2);
    bf16 *a16 = memory.take<bf16>(s.E * s.K), *b16 = memory.take<bf16>(s.N * s.E), *dh = memory.take<bf16>(s.M * s.E);
    uint32_t *pairs_h = memory.take<uint32_t>(half * s.E), *pairs_dh = memory.take<uint32_t>(half * s.E);
    float* row_scale = memory.take<float>(quant ? s.M : 0);
    uint8_t* quantised = memory.take<uint8_t>(quant ? s.M * code_stride : 0);
    if (s.R) {
        round_to(a, s.R, s.K, s.K, 1.0f, a16);
        std::memset(a16 + s.R * s.K, 0, (s.E - s.R) * s.K * 2);
        round_to(b, s.N, s.R, s.E, scale, b16);
        for (int64_t c = 0; c < wide; c += 16)
            pack_pairs(b16 + c, s.E, s.N, s.E - c, 16, packed_b + c * s.N / 2);
    }
    const Int8 q{row_scale, code_scale, code_offset};
#pragma omp parallel
    {
#pragma omp for
        for (int64_t m = 0; m < s.M; m += MR) {
            const int64_t rows = min64(MR, s.M - m);
            for (int64_t r = m; quant && r < m + rows; ++r)
                row_scale[r] = quantise_row(dy + r * s.N, s.N, quantised + r * code_stride);
            if (s.R) thin((const char*)(dy + m * s.N), 2 * s.N, rows, packed_b, s.N / 2, s.E, dh + m * s.E);
        }
        for (int64_t g = 0; g < num; g += group) {
            const int64_t to = min64(num, g + group);
#pragma omp for schedule(dynamic)
            for (int64_t p = g; p < to; ++p) {
                uint32_t* out = packed + (p - g) * words * PW;
                if (quant) std::memcpy(out, codes + p * first_words * PW, first_words * PW * 4);
                else pack_pairs(w + p * PW, s.K, s.N, s.K - p * PW, PW, out);
                if (s.E) pack_pairs(a16 + p * PW, s.K, s.E, s.K - p * PW, PW, out + first_words * PW);
            }
            const Part left = quant ? Part{(const char*)quantised, code_stride, first_words}
                                    : Part{(const char*)dy, 2 * s.N, first_words};
            panels(left, {(const char*)dh, 2 * s.E, s.E / 2}, packed, g, to, s.M, quant ? &q : nullptr, dx, s.K,
                   s.K);
        }
        if (s.R) {
            interleave(h, s.M, s.E, pairs_h);
            interleave(dh, s.M, s.E, pairs_dh);
            outer(pairs_dh, s.E, x, s.M, s.K, 1.0f, da);
            outer(pairs_h, s.E, dy, s.M, s.N, scale, db);
        }
    }
}

// codes int8 [N, K] → panels [up(K, 48) / 48][up(N, 4) / 4][48] of words, and 128 Σ_n code as offset [up(K, 48)]
EXPORT void lumen_pack_int8(const int8_t* codes, int64_t N, int64_t K, int8_t* out, int* offset) {
    const int64_t num = (K + PW - 1) / PW, words = (N + 3) / 4;
#pragma omp parallel for
    for (int64_t p = 0; p < num; ++p) {
        int sums[PW] = {};
        for (int64_t w = 0; w < words; ++w)
            for (int64_t c = 0; c < PW; ++c)
                for (int64_t i = 0; i < 4; ++i) {
                    const int64_t n = 4 * w + i, k = p * PW + c;
                    const int8_t code = n < N && k < K ? codes[n * K + k] : 0;
                    sums[c] += code;
                    out[((p * words + w) * PW + c) * 4 + i] = code;
                }
        for (int64_t c = 0; c < PW; ++c) offset[p * PW + c] = 128 * sums[c];
    }
}
