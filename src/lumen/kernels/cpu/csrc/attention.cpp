// Causal attention over rows that hold one or several examples; grouped heads; forward and backward.
//
// Query i of a row sees keys first[i] .. i, where first[i] is the start of its example (or of the sliding window).
// Queries are done in blocks of BQ; a block needs the keys from the least first[i] to its last query, in panels of 48,
// and nothing else is computed: what an example costs is quadratic in its own length only.  A block's scores [BQ, keys]
// stay in the cache of the core, so the softmax is the plain one, in fp32, and the products read bf16.
//
// Backward keeps o and the logarithm of each row's sum and makes the probabilities again:
//     P = exp(s Q Kᵀ - lse),  dV += Pᵀ dO,  dP = dO Vᵀ,  dS = s P (dP - rowsum(dO O)),  dQ = dS K,  dK += dSᵀ Q
// The transposed products need words along the queries: two rows of P or dS are interleaved as they are made.
#include "tiles.h"

#include <cmath>

namespace {

constexpr int BQ = 48, KP = 48, KV = 3;  // queries of a block; keys of a panel, and that in vectors

struct Shape {
    int64_t batch, heads, groups, length, size;  // groups: key heads
    float scale;
    int64_t window;  // 0: none
};
struct View {  // [batch, head, token, size], strides in elements
    bf16* at;
    int64_t b, h, t;
    bf16* row(int64_t i, int64_t j, int64_t k) const { return at + i * b + j * h + k * t; }
};

// The columns of a head, in chunks of up to 4 vectors
int chunk(int64_t size, int64_t d) { return (int)min64(4, (size - d) / 16); }

void starts(const Shape& s, const int* segments, int64_t* first_key) {
    int64_t start = 0;
    for (int64_t i = 0; i < s.length; ++i) {
        if (segments && i && segments[i] != segments[i - 1]) start = i;
        first_key[i] = s.window ? max64(start, i - s.window + 1) : start;
    }
}

struct Block {  // queries [q, q + rows) and the key panels [from, to) they see
    int64_t q, rows, from, to;
    int64_t keys() const { return (to - from) * KP; }
};
Block block_of(const Shape& s, const int64_t* first_key, int64_t q) {
    const int64_t rows = min64(BQ, s.length - q);
    return {q, rows, first_key[q] / KP, (q + rows - 1) / KP + 1};  // first_key never falls
}

// Panels of Xᵀ: [panel][size / 2][KP]
void pack_keys(const Shape& s, const View& x, int64_t b, int64_t g, uint32_t* out) {
    for (int64_t p = 0; p * KP < s.length; ++p)
        pack_rows((const char*)x.row(b, g, p * KP), 2 * x.t, s.length - p * KP, s.size / 2, KP, out + p * KP * s.size / 2);
}
// Pairs of rows of X, column chunk by chunk: [chunk][rows / 2][16 nv]; rows up to `padded` are zero
void pack_values(const Shape& s, const bf16* x, int64_t stride, int64_t rows, int64_t padded, uint32_t* out) {
    for (int64_t d = 0; d < s.size; d += 64) {
        const int nv = chunk(s.size, d);
        pack_pairs(x + d, stride, rows, s.size - d, 16 * nv, out);
        std::memset(out + (rows + 1) / 2 * 16 * nv, 0, (padded / 2 - (rows + 1) / 2) * 64 * nv);
        out += padded / 2 * 16 * nv;
    }
}

// One row of scores → bf16 weights e^(scale (s - max)), zero outside [lo, hi]; returns the sum, sets the maximum
float softmax_row(const float* s, int64_t keys, int64_t lo, int64_t hi, float scale, bf16* p, float* maximum) {
    __m512 best = _mm512_set1_ps(-INFINITY);
    const int64_t from = lo / 16 * 16;
    for (int64_t k = from; k <= hi; k += 16) {
        const __mmask16 m = first(hi + 1 - k) & ~first(lo - k);
        best = _mm512_mask_max_ps(best, m, best, _mm512_load_ps(s + k));
    }
    const float top = _mm512_reduce_max_ps(best) * scale;
    __m512 sum = _mm512_setzero_ps();
    std::memset(p, 0, 2 * from);
    int64_t k = from;
    for (; k <= hi; k += 16) {
        const __mmask16 m = first(hi + 1 - k) & ~first(lo - k);
        const __m512 x = _mm512_fmsub_ps(_mm512_load_ps(s + k), _mm512_set1_ps(scale), _mm512_set1_ps(top));
        const __m512 e = _mm512_maskz_mov_ps(m, exp512(x));
        sum = _mm512_add_ps(sum, e);
        store_bf16(p + k, e);
    }
    if (k < keys) std::memset(p + k, 0, 2 * (keys - k));
    *maximum = top;
    return _mm512_reduce_add_ps(sum);
}

int64_t panels_of(const Shape& s) { return (s.length + KP - 1) / KP; }

}  // namespace

// q [B, H, T, D], k, v [B, G, T, D]; o [B, H, T, D] is written, and lse fp32 [B, H, T].  segments: int32 [B, T] or null.
// strides: (b, h, t) of q, k, v, o in elements; the last dimension is dense.
EXPORT void lumen_attention_forward(bf16* q, bf16* k, bf16* v, bf16* o, float* lse, const int* segments,
                                        const int64_t* n, const int64_t* strides, float scale) {
    const Shape s{n[0], n[1], n[2], n[3], n[4], scale, n[5]};
    const View vq{q, strides[0], strides[1], strides[2]}, vk{k, strides[3], strides[4], strides[5]};
    const View vv{v, strides[6], strides[7], strides[8]}, vo{o, strides[9], strides[10], strides[11]};
    const int64_t panels = panels_of(s), padded = panels * KP, blocks = (s.length + BQ - 1) / BQ;
    const int64_t one = padded * s.size / 2, share = s.heads / s.groups;
    uint32_t* packed = static_cast<uint32_t*>(std::aligned_alloc(64, up(s.batch * s.groups * one * 8, 64)));
    int64_t* first_key = static_cast<int64_t*>(std::malloc(s.batch * s.length * 8));
    for (int64_t b = 0; b < s.batch; ++b)
        starts(s, segments ? segments + b * s.length : nullptr, first_key + b * s.length);
#pragma omp parallel
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < s.batch * s.groups; ++i) {
            pack_keys(s, vk, i / s.groups, i % s.groups, packed + 2 * i * one);
            pack_values(s, vv.row(i / s.groups, i % s.groups, 0), vv.t, s.length, padded, packed + (2 * i + 1) * one);
        }
        static thread_local Scratch memory;
        float* scores = static_cast<float*>(memory.get(BQ * (padded * 6 + s.size * 4)));
        float* sums = scores + BQ * padded;
        bf16* weights = reinterpret_cast<bf16*>(sums + BQ * s.size);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < s.batch * s.heads * blocks; ++i) {
            const int64_t at = blocks - 1 - i % blocks, h = i / blocks % s.heads, b = i / blocks / s.heads;
            const int64_t* lo = first_key + b * s.length;
            const Block w = block_of(s, lo, at * BQ);
            const uint32_t* keys = packed + 2 * (b * s.groups + h / share) * one;
            const uint32_t* values = keys + one;
            const int64_t width = w.keys(), base = w.from * KP;
            for (int64_t p = w.from; p < w.to; ++p)
                product(KV, (const char*)vq.row(b, h, w.q), 2 * vq.t, 4, keys + p * KP * s.size / 2, s.size / 2,
                        scores + p * KP - base, width, w.rows, false);
            float total[BQ];
            for (int64_t r = 0; r < w.rows; ++r) {
                float top;
                total[r] = softmax_row(scores + r * width, width, lo[w.q + r] - base, w.q + r - base, s.scale,
                                       weights + r * width, &top);
                lse[(b * s.heads + h) * s.length + w.q + r] = top + __builtin_logf(total[r]);
            }
            for (int64_t d = 0; d < s.size; d += 64) {
                const int nv = chunk(s.size, d);
                const uint32_t* panel = values + padded / 2 * d + base / 2 * 16 * nv;
                product(nv, (const char*)weights, 2 * width, 4, panel, width / 2, sums + d, s.size, w.rows, false);
            }
            for (int64_t r = 0; r < w.rows; ++r) {
                const __m512 inverse = _mm512_set1_ps(1.0f / total[r]);
                for (int64_t d = 0; d < s.size; d += 16)
                    store_bf16(vo.row(b, h, w.q + r) + d, _mm512_mul_ps(_mm512_load_ps(sums + r * s.size + d), inverse));
            }
        }
    }
    std::free(packed);
    std::free(first_key);
}

// Gradients dq [B, H, T, D], dk, dv [B, G, T, D] are written.  strides: of q, k, v, o, go, dq, dk, dv.
EXPORT void lumen_attention_backward(bf16* q, bf16* k, bf16* v, bf16* o, bf16* go, bf16* dq, bf16* dk, bf16* dv,
                                         const float* lse, const int* segments, const int64_t* n,
                                         const int64_t* strides, float scale) {
    const Shape s{n[0], n[1], n[2], n[3], n[4], scale, n[5]};
    bf16* at[8] = {q, k, v, o, go, dq, dk, dv};
    View view[8];
    for (int i = 0; i < 8; ++i) view[i] = {at[i], strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]};
    const View &vq = view[0], &vk = view[1], &vv = view[2], &vo = view[3], &vg = view[4];
    const int64_t padded = panels_of(s) * KP, one = padded * s.size / 2, share = s.heads / s.groups;
    int64_t* first_key = static_cast<int64_t*>(std::malloc(s.batch * s.length * 8));
    for (int64_t b = 0; b < s.batch; ++b)
        starts(s, segments ? segments + b * s.length : nullptr, first_key + b * s.length);
#pragma omp parallel
    {
        static thread_local Scratch memory;
        // words: three packed operands; dK, dV; scores, dP; dS by rows; P and dS by pairs; Q and dO by pairs; dQ
        const int64_t words = 3 * one + 2 * padded * s.size + BQ * padded * 2 + 3 * BQ * padded / 2 + 2 * BQ * s.size;
        uint32_t* packed_k = static_cast<uint32_t*>(memory.get(4 * words));
        uint32_t *packed_v = packed_k + one, *pairs_k = packed_v + one;
        float *sum_k = reinterpret_cast<float*>(pairs_k + one), *sum_v = sum_k + padded * s.size;
        float *scores = sum_v + padded * s.size, *slopes = scores + BQ * padded;
        bf16* rows_s = reinterpret_cast<bf16*>(slopes + BQ * padded);
        uint32_t* pairs_p = reinterpret_cast<uint32_t*>(slopes + BQ * padded) + BQ * padded / 2;
        uint32_t* pairs_s = pairs_p + BQ * padded / 2;
        uint32_t *pairs_q = pairs_s + BQ * padded / 2, *pairs_g = pairs_q + BQ / 2 * s.size;
        float* sum_q = reinterpret_cast<float*>(pairs_g + BQ / 2 * s.size);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < s.batch * s.groups; ++i) {
            const int64_t b = i / s.groups, g = i % s.groups;
            const int64_t* lo = first_key + b * s.length;
            pack_keys(s, vk, b, g, packed_k);
            pack_keys(s, vv, b, g, packed_v);
            pack_values(s, vk.row(b, g, 0), vk.t, s.length, padded, pairs_k);
            std::memset(sum_k, 0, 2 * padded * s.size * 4);
            for (int64_t j = 0; j < share * ((s.length + BQ - 1) / BQ); ++j) {
                const int64_t h = g * share + j % share;
                const Block w = block_of(s, lo, j / share * BQ);
                const int64_t width = w.keys(), base = w.from * KP, even = up(w.rows, 2);
                for (int64_t p = w.from; p < w.to; ++p) {
                    const int64_t column = p * KP - base, panel = p * KP * s.size / 2;
                    product(KV, (const char*)vq.row(b, h, w.q), 2 * vq.t, 4, packed_k + panel, s.size / 2,
                            scores + column, width, w.rows, false);
                    product(KV, (const char*)vg.row(b, h, w.q), 2 * vg.t, 4, packed_v + panel, s.size / 2,
                            slopes + column, width, w.rows, false);
                }
                for (int64_t r = 0; r < even; r += 2) {
                    float delta[2] = {0, 0}, log_sum[2] = {0, 0};
                    for (int e = 0; e < 2 && r + e < w.rows; ++e) {
                        __m512 sum = _mm512_setzero_ps();
                        const bf16 *out = vo.row(b, h, w.q + r + e), *up_grad = vg.row(b, h, w.q + r + e);
                        for (int64_t d = 0; d < s.size; d += 16)
                            sum = _mm512_fmadd_ps(load_bf16(out + d), load_bf16(up_grad + d), sum);
                        delta[e] = _mm512_reduce_add_ps(sum);
                        log_sum[e] = lse[(b * s.heads + h) * s.length + w.q + r + e];
                    }
                    for (int64_t c = 0; c < width; c += 16) {
                        __m256i p[2], d[2];
                        for (int e = 0; e < 2; ++e) {
                            const int64_t row = w.q + r + e;
                            __mmask16 m = 0;
                            if (r + e < w.rows) m = first(row + 1 - base - c) & ~first(lo[row] - base - c);
                            const float* x = scores + (r + e) * width + c;
                            const __m512 z = _mm512_fmsub_ps(_mm512_maskz_load_ps(m, x), _mm512_set1_ps(s.scale),
                                                             _mm512_set1_ps(log_sum[e]));
                            const __m512 prob = m ? _mm512_maskz_mov_ps(m, exp512(z)) : _mm512_setzero_ps();
                            const __m512 dp = _mm512_maskz_load_ps(m, slopes + (r + e) * width + c);
                            const __m512 ds = _mm512_mul_ps(_mm512_mul_ps(prob, _mm512_set1_ps(s.scale)),
                                                            _mm512_sub_ps(dp, _mm512_set1_ps(delta[e])));
                            p[e] = to_bf16(prob);
                            d[e] = to_bf16(ds);
                            _mm256_store_si256((__m256i*)(rows_s + (r + e) * width + c), d[e]);
                        }
                        _mm512_store_si512(pairs_p + r / 2 * width + c, pair(p[0], p[1]));
                        _mm512_store_si512(pairs_s + r / 2 * width + c, pair(d[0], d[1]));
                    }
                }
                pack_values(s, vq.row(b, h, w.q), vq.t, w.rows, even, pairs_q);
                pack_values(s, vg.row(b, h, w.q), vg.t, w.rows, even, pairs_g);
                for (int64_t d = 0; d < s.size; d += 64) {
                    const int nv = chunk(s.size, d);
                    const uint32_t* panel = pairs_k + padded / 2 * d + base / 2 * 16 * nv;
                    product(nv, (const char*)rows_s, 2 * width, 4, panel, width / 2, sum_q + d, s.size, w.rows, false);
                    product(nv, (const char*)pairs_p, 4, 4 * width, pairs_g + even / 2 * d, even / 2,
                            sum_v + base * s.size + d, s.size, width, true);
                    product(nv, (const char*)pairs_s, 4, 4 * width, pairs_q + even / 2 * d, even / 2,
                            sum_k + base * s.size + d, s.size, width, true);
                }
                for (int64_t r = 0; r < w.rows; ++r)
                    for (int64_t d = 0; d < s.size; d += 16)
                        store_bf16(view[5].row(b, h, w.q + r) + d, _mm512_load_ps(sum_q + r * s.size + d));
            }
            for (int64_t t = 0; t < s.length; ++t)
                for (int64_t d = 0; d < s.size; d += 16) {
                    store_bf16(view[6].row(b, g, t) + d, _mm512_load_ps(sum_k + t * s.size + d));
                    store_bf16(view[7].row(b, g, t) + d, _mm512_load_ps(sum_v + t * s.size + d));
                }
        }
    }
    std::free(first_key);
}
