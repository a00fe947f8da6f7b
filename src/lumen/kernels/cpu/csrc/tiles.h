// Tiles of a product and how they are walked: sums to fp32 memory, or rounded to bf16 with an int8 epilogue.
#pragma once
#include "common.h"

namespace {

constexpr int PW = 48, NV = 3, MR = 8, ROWS = 96;  // columns of a panel, in vectors; rows of a tile and, at most, of a task
constexpr int64_t GROUP_BYTES = 4 << 20;           // packed weights that exist at one time


// Rows of a task: a whole number of tiles, at most ROWS, so that every thread gets the same number of tasks.
inline int64_t task_rows(int64_t rows) {
    const int64_t threads = omp_get_num_threads(), each = (rows + threads - 1) / threads;
    const int64_t tasks = (each + ROWS - 1) / ROWS;
    return max64(MR, up((each + tasks - 1) / max64(1, tasks), MR));
}

// C (+)= A B for one tile, C fp32 with ldc columns
template <int R, int V>
void tile(const char* a, int64_t rs, int64_t ks, const uint32_t* b, int64_t steps, float* c, int64_t ldc, bool add) {
    __m512 sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) sum[r][j] = add ? _mm512_load_ps(c + r * ldc + 16 * j) : _mm512_setzero_ps();
    multiply<Bf16Dot, R, V>(sum, a, rs, ks, b, steps);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) _mm512_store_ps(c + r * ldc + 16 * j, sum[r][j]);
}
using Tile = void (*)(const char*, int64_t, int64_t, const uint32_t*, int64_t, float*, int64_t, bool);
#define FLOAT_ROWS(NV) {nullptr, tile<1, NV>, tile<2, NV>, tile<3, NV>, tile<4, NV>, tile<5, NV>, tile<6, NV>, tile<7, NV>, \
                  tile<8, NV>}
constexpr Tile TILES[5][9] = {{}, FLOAT_ROWS(1), FLOAT_ROWS(2), FLOAT_ROWS(3), FLOAT_ROWS(4)};

// C[rows, 16 nv] (+)= A B with one panel of B
inline void product(int nv, const char* a, int64_t rs, int64_t ks, const uint32_t* b, int64_t steps, float* c, int64_t ldc,
             int64_t rows, bool add) {
    const int64_t step = nv == 4 ? 6 : 8;
    for (int64_t r = 0; r < rows; r += step)
        TILES[nv][min64(step, rows - r)](a + r * rs, rs, ks, b, steps, c + r * ldc, ldc, add);
}

struct Part {  // an operand A by rows, read in words
    const char* at;
    int64_t stride, words;
};

// One tile of [first | second] · panel → bf16.  In int8, `first` has words of 4 codes, scaled when its sums are whole.
struct Int8 {
    const float *row_scale, *column_scale;
    const int *offset;
};
template <int R, bool QUANT>
void bf16_tile(Part first_part, Part second, const uint32_t* panel, const Int8* q, int64_t row, int64_t column, bf16* out,
          int64_t stride, int64_t columns) {
    __m512 sum[R][NV];
    if constexpr (QUANT) {
        __m512i whole[R][NV];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) whole[r][j] = _mm512_setzero_si512();
        multiply<Int8Dot, R, NV>(whole, first_part.at, first_part.stride, 4, panel, first_part.words);
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) {
            const __m512i offset = _mm512_loadu_si512(q->offset + column + 16 * j);
            const __m512 scale = _mm512_loadu_ps(q->column_scale + column + 16 * j);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sum[r][j] = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(whole[r][j], offset)),
                                                        _mm512_set1_ps(q->row_scale[row + r])), scale);
        }
    } else {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) sum[r][j] = _mm512_setzero_ps();
        multiply<Bf16Dot, R, NV>(sum, first_part.at, first_part.stride, 4, panel, first_part.words);
    }
    multiply<Bf16Dot, R, NV>(sum, second.at, second.stride, 4, panel + first_part.words * PW, second.words);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) store_bf16(out + r * stride + 16 * j, sum[r][j], first(columns - 16 * j));
}
using Bf16Tile = void (*)(Part, Part, const uint32_t*, const Int8*, int64_t, int64_t, bf16*, int64_t, int64_t);
#define BF16_ROWS(Q) {nullptr, bf16_tile<1, Q>, bf16_tile<2, Q>, bf16_tile<3, Q>, bf16_tile<4, Q>, \
                      bf16_tile<5, Q>, bf16_tile<6, Q>, bf16_tile<7, Q>, bf16_tile<8, Q>}
constexpr Bf16Tile BF16_TILES[9] = BF16_ROWS(false), INT8_TILES[9] = BF16_ROWS(true);

// Panels [from, to) of [first | second] times B → out [M, columns]; called by every thread of a team.
inline void panels(const Part& a, const Part& b, const uint32_t* packed, int64_t from, int64_t to, int64_t rows,
            const Int8* q, bf16* out, int64_t stride, int64_t columns) {
    const Bf16Tile* tiles = q ? INT8_TILES : BF16_TILES;
    const int64_t words = a.words + b.words, task = task_rows(rows);
#pragma omp for schedule(dynamic)
    for (int64_t block = 0; block < rows; block += task)
        for (int64_t p = from; p < to; ++p)
            for (int64_t r = block; r < min64(rows, block + task); r += MR)
                tiles[min64(MR, rows - r)]({a.at + r * a.stride, a.stride, a.words}, {b.at + r * b.stride, b.stride, b.words},
                                           packed + (p - from) * words * PW, q, r, p * PW, out + r * stride + p * PW,
                                           stride, columns - p * PW);
}

struct Carve {  // pieces of one allocation
    char* at;
    template <class T>
    T* take(int64_t count) {
        T* piece = reinterpret_cast<T*>(at);
        at += up(count * (int64_t)sizeof(T), 64);
        return piece;
    }
};

inline int64_t group_of(int64_t words) { return max64(1, GROUP_BYTES / (words * PW * 4)); }

}  // namespace
