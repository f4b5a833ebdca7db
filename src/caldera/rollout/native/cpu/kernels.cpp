// What the sampler does on a CPU between products of matrices: norms, rotations, attention.
//
// Compiled for heads of the size DIM, so that loops become vector instructions. Sums are taken in an
// order that depends on nothing but the sizes of one sequence.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using Index = int64_t;

// DIM, PAGE_SIZE and TILE are given to the compiler.
static_assert(DIM % 8 == 0 && PAGE_SIZE > 0 && TILE == 32);

constexpr Index FEW = 1 << 15;  // cells for which the other threads are not worth waking

// The tokens of one forward pass. Neighbours of a sequence are taken by parts of a few at a time.
struct Step {
    Index tokens;         // T
    Index parts;          // P
    Index table_width;    // W
    Index threads;
    const Index *slots;   // (T,) where in the cache keys and values are kept
    const Index *first;   // (P,) the first token of each part
    const Index *count;   // (P,) tokens of each part
    const Index *place;   // (P,) the position of the first in its sequence
    const Index *owner;   // (P,) the sequence of each part
    const Index *tables;  // (S, W) the pages of each sequence
};

// One layer's tensors. A token's heads lie behind each other, tokens are `*_stride` cells apart.
struct Layer {
    float *query, *key;
    const float *value;
    Index query_stride, key_stride, value_stride;
    const float *cos, *sin;  // (T, D) to rotate queries and keys by, or null
    const float *query_norm, *key_norm;  // (D,) weights of each head's norm, or null
    float *keys, *values;    // (pages, PAGE_SIZE, Hkv, D)
    float *out;              // (T, Hq, D)
    Index query_heads, key_heads;
    Index window;            // positions that a token sees, itself included; 0: all
    float scale, head_epsilon;
};

template <int WIDTH>
struct Lanes {
    typedef float type __attribute__((vector_size(4 * WIDTH)));
};

template <int WIDTH>
static inline float sum(typename Lanes<WIDTH>::type lanes) {
    if constexpr (WIDTH == 1) {
        return lanes[0];
    } else {
        typename Lanes<WIDTH / 2>::type low, high;
        std::memcpy(&low, &lanes, sizeof low);
        std::memcpy(&high, reinterpret_cast<char *>(&lanes) + sizeof low, sizeof high);
        return sum<WIDTH / 2>(low + high);
    }
}

// e to the power of x, which is at most 0.
static inline float exp_of(float x) {
    x = std::max(x, -87.0f);
    const int whole = static_cast<int>(x * 1.44269504f - 0.5f);
    const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float power = 1.0f / 5040;
    for (float next : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        power = power * rest + next;
    const int32_t bits = (whole + 127) << 23;
    float two;
    std::memcpy(&two, &bits, sizeof two);
    return power * two;
}

// Scores become weights that add up to 1.
static void soften(float *scores, Index count) {
    float largest = scores[0], total = 0;
#pragma omp simd reduction(max : largest)
    for (Index t = 1; t < count; t++) largest = std::max(largest, scores[t]);
#pragma omp simd reduction(+ : total)
    for (Index t = 0; t < count; t++) {
        scores[t] = exp_of(scores[t] - largest);
        total += scores[t];
    }
    const float share = 1.0f / total;
    for (Index t = 0; t < count; t++) scores[t] *= share;
}

static void rotate(float *head, const float *cos, const float *sin) {
    constexpr Index half = DIM / 2;
#pragma omp simd
    for (Index d = 0; d < half; d++) {
        const float low = head[d], high = head[d + half];
        head[d] = low * cos[d] - high * sin[d];
        head[d + half] = high * cos[d + half] + low * sin[d + half];
    }
}

static void normalise(const float *from, float *to, Index size, float epsilon) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (Index i = 0; i < size; i++) total += from[i] * from[i];
    const float factor = 1.0f / std::sqrt(total / size + epsilon);
#pragma omp simd
    for (Index i = 0; i < size; i++) to[i] = from[i] * factor;
}

// What a head of queries or keys goes through before it is used.
static void prepare(float *head, const float *norm, float epsilon, const float *cos,
                    const float *sin) {
    if (norm) {
        normalise(head, head, DIM, epsilon);
        for (Index d = 0; d < DIM; d++) head[d] *= norm[d];
    }
    rotate(head, cos, sin);
}

// Prepare a token's queries and keys, and keep its keys and values.
static void take_in(const Step &step, const Layer &layer, Index token) {
    const Index kept = layer.key_heads * DIM;
    float *key = layer.key + token * layer.key_stride;
    if (layer.cos) {
        const float *cos = layer.cos + token * DIM, *sin = layer.sin + token * DIM;
        float *query = layer.query + token * layer.query_stride;
        for (Index head = 0; head < layer.query_heads; head++)
            prepare(query + head * DIM, layer.query_norm, layer.head_epsilon, cos, sin);
        for (Index head = 0; head < layer.key_heads; head++)
            prepare(key + head * DIM, layer.key_norm, layer.head_epsilon, cos, sin);
    }
    const Index cell = step.slots[token] * kept;
    std::memcpy(layer.keys + cell, key, 4 * kept);
    std::memcpy(layer.values + cell, layer.value + token * layer.value_stride, 4 * kept);
}

// The queries of a part, with some of its key heads. Keys and values are read page by page, so that
// the memory of the next page is on its way while this one is used.
struct Part {
    static constexpr int WIDTH = DIM % 16 ? 8 : 16, PIECES = DIM / WIDTH;
    static constexpr int MANY = 4;  // queries at a time: what is read of keys serves all of them
    typedef Lanes<WIDTH>::type lanes;

    const Step &step;
    const Layer &layer;
    Index part, first_head, heads;

    const Index stride = layer.key_heads * DIM;
    const Index group = layer.query_heads / layer.key_heads;
    const Index queries = step.count[part] * group;  // of each key head, in the order of tokens
    const Index place = step.place[part], end = place + step.count[part];
    const Index begin = first_seen(place), width = end - begin;  // positions that any of them sees

    Index first_seen(Index position) const {
        return layer.window ? std::max<Index>(0, position - layer.window + 1) : 0;
    }

    // Where a query's head lies among its token's.
    Index offset(Index head, Index query) const { return (head * group + query % group) * DIM; }

    const float *asked(Index head, Index query) const {
        const Index token = step.first[part] + query / group;
        return layer.query + token * layer.query_stride + offset(head, query);
    }

    float *out(Index head, Index query) const {
        const Index token = step.first[part] + query / group;
        return layer.out + token * layer.query_heads * DIM + offset(head, query);
    }

    const float *at(const float *pages, Index position) const {
        const Index *table = step.tables + step.owner[part] * step.table_width;
        const Index page = table[position / PAGE_SIZE];
        return pages + (page * PAGE_SIZE + position % PAGE_SIZE) * stride + first_head * DIM;
    }

    static void load(lanes *into, const float *from) {
        for (int p = 0; p < PIECES; p++) std::memcpy(into + p, from + p * WIDTH, sizeof(lanes));
    }

    void attend(std::vector<float> &room) const {
        if (static_cast<Index>(room.size()) < heads * queries * width)
            room.resize(heads * queries * width);
        over_pages(layer.keys, room.data(), Score{*this});
        for (Index head = 0; head < heads; head++)
            for (Index query = 0; query < queries; query++) {
                hide_and_soften(room.data() + (head * queries + query) * width, query);
                std::memset(out(first_head + head, query), 0, 4 * DIM);
            }
        over_pages(layer.values, room.data(), Gather{*this});
    }

    // What is done with some queries of a head, and the positions of a page.
    template <class Action>
    void over_pages(const float *pages, float *scores, Action action) const {
        for (Index position = begin; position < end;) {
            const Index next = std::min((position / PAGE_SIZE + 1) * PAGE_SIZE, end);
            const float *cells = at(pages, position);
            if (next < end) prefetch(at(pages, next), std::min<Index>(PAGE_SIZE, end - next));
            if (pages == layer.keys) prefetch(at(layer.values, position), next - position);
            for (Index head = 0; head < heads; head++) {
                float *row = scores + head * queries * width + (position - begin);
                Index query = 0;
                for (; query + MANY <= queries; query += MANY)
                    action.template run<MANY>(cells + head * DIM, row + query * width,
                                              next - position, first_head + head, query);
                for (; query < queries; query++)
                    action.template run<1>(cells + head * DIM, row + query * width,
                                           next - position, first_head + head, query);
            }
            position = next;
        }
    }

    void prefetch(const float *cells, Index count) const {
        for (Index token = 0; token < count; token++)
            for (Index cell = 0; cell < heads * DIM; cell += 16)
                __builtin_prefetch(cells + token * stride + cell, 0, 2);
    }

    struct Score {
        const Part &part;

        template <int COUNT>
        void run(const float *keys, float *scores, Index count, Index head, Index query) const {
            lanes asked[COUNT][PIECES];
            for (int i = 0; i < COUNT; i++) load(asked[i], part.asked(head, query + i));
            for (Index t = 0; t < count; t++) {
                lanes key[PIECES];
                load(key, keys + t * part.stride);
                for (int i = 0; i < COUNT; i++) {
                    lanes product = asked[i][0] * key[0];
                    for (int p = 1; p < PIECES; p++) product += asked[i][p] * key[p];
                    scores[i * part.width + t] = part.layer.scale * sum<WIDTH>(product);
                }
            }
        }
    };

    struct Gather {
        const Part &part;

        template <int COUNT>
        void run(const float *values, float *weights, Index count, Index head, Index query) const {
            lanes found[COUNT][PIECES];
            for (int i = 0; i < COUNT; i++) load(found[i], part.out(head, query + i));
            for (Index t = 0; t < count; t++) {
                lanes value[PIECES];
                load(value, values + t * part.stride);
                for (int i = 0; i < COUNT; i++)
                    for (int p = 0; p < PIECES; p++)
                        found[i][p] += weights[i * part.width + t] * value[p];
            }
            for (int i = 0; i < COUNT; i++)
                std::memcpy(part.out(head, query + i), found[i], 4 * DIM);
        }
    };

    void hide_and_soften(float *scores, Index query) const {
        const Index position = place + query / group;
        const Index from = first_seen(position) - begin, to = position + 1 - begin;
        std::fill(scores, scores + from, 0.0f);
        soften(scores + from, to - from);
        std::fill(scores + to, scores + width, 0.0f);
    }
};

// To be called by all threads of a team: the tokens attend, after all keys and values are kept.
static void attend_all(const Step &step, const Layer &layer) {
    // the heads of a token lie together: they are shared out only where there are few tokens
    const Index heads = step.parts < 4 * step.threads ? 1 : layer.key_heads;
    const Index slices = layer.key_heads / heads;
    std::vector<float> room;
#pragma omp for schedule(dynamic, 2)
    for (Index item = 0; item < step.parts * slices; item++)
        Part{step, layer, item / slices, item % slices * heads, heads}.attend(room);
}

// Keep the new keys and values, and let all tokens attend.
extern "C" void caldera_attend(const Step *step, const Layer *layer) {
#pragma omp parallel num_threads(step->threads)
    {
#pragma omp for schedule(static)
        for (Index token = 0; token < step->tokens; token++) take_in(*step, *layer, token);
        attend_all(*step, *layer);
    }
}

// Each row (T, H) over the root of its mean square.
extern "C" void caldera_normalise(const float *rows, float *out, Index count, Index size,
                                  float epsilon, Index threads) {
    if (count * size < FEW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Index row = 0; row < count; row++)
        normalise(rows + row * size, out + row * size, size, epsilon);
}

// ---- whole layers whose matrices are so small that each product would cost less than its call

constexpr Index ROWS = 8;  // tokens that go through a layer together

// Matrices (K, N) as (N / TILE, K, TILE).
struct Matrices {
    const float *qkv_proj, *bias;        // for queries, keys and values; the bias may be null
    const float *o_proj, *gate, *up, *down;
    Index hidden, inner;
    float first_epsilon, second_epsilon;
    float *values;                     // (T, hidden) that the layer changes
};

// out (COUNT, N) gets rows (COUNT, K) times the matrix, and keeps what it was if `adds`.
template <int COUNT>
static void multiply_some(const float *rows, Index depth, const float *tiles, Index columns,
                          float *out, Index stride, bool adds) {
    typedef Lanes<16>::type lanes;
    for (Index column = 0; column < columns; column += TILE) {
        lanes sums[COUNT][2] = {};
        for (int i = 0; adds && i < COUNT; i++)
            std::memcpy(sums[i], out + i * stride + column, sizeof sums[i]);
        const float *tile = tiles + column * depth;
        for (Index k = 0; k < depth; k++) {
            lanes low, high;
            std::memcpy(&low, tile + k * TILE, sizeof low);
            std::memcpy(&high, tile + k * TILE + 16, sizeof high);
            for (int i = 0; i < COUNT; i++) {
                sums[i][0] += rows[i * depth + k] * low;
                sums[i][1] += rows[i * depth + k] * high;
            }
        }
        for (int i = 0; i < COUNT; i++)
            std::memcpy(out + i * stride + column, sums[i], sizeof sums[i]);
    }
}

static void multiply(const float *rows, Index count, Index depth, const float *tiles,
                     Index columns, float *out, bool adds = false) {
    if (count == ROWS) return multiply_some<ROWS>(rows, depth, tiles, columns, out, columns, adds);
    for (Index row = 0; row < count; row++)
        multiply_some<1>(rows + row * depth, depth, tiles, columns, out + row * columns, columns,
                         adds);
}

// gate times its sigmoid times up
static void swish(float *gate, const float *up, Index count) {
#pragma omp simd
    for (Index i = 0; i < count; i++) {
        const float power = exp_of(-std::abs(gate[i])), share = 1.0f / (1.0f + power);
        gate[i] *= (gate[i] < 0 ? power * share : share) * up[i];
    }
}

// From values to queries, keys and values of some tokens.
static void enter(const Step &step, const Layer &layer, const Matrices &by, Index first,
                  Index count, std::vector<float> &room) {
    const Index size = by.hidden, columns = layer.query_stride;
    room.resize(ROWS * size);
    for (Index i = 0; i < count; i++)
        normalise(by.values + (first + i) * size, room.data() + i * size, size, by.first_epsilon);
    float *heads = layer.query + first * columns;
    for (Index i = 0; by.bias && i < count; i++)
        std::memcpy(heads + i * columns, by.bias, 4 * columns);
    multiply(room.data(), count, size, by.qkv_proj, columns, heads, by.bias);
    for (Index i = 0; i < count; i++) take_in(step, layer, first + i);
}

// From what some tokens found to their values.
static void leave(const Layer &layer, const Matrices &by, Index first, Index count,
                  std::vector<float> &room) {
    const Index size = by.hidden, found = layer.query_heads * DIM;
    room.resize(ROWS * (size + 2 * by.inner));
    float *normed = room.data(), *gate = normed + ROWS * size, *up = gate + ROWS * by.inner;
    float *values = by.values + first * size;
    multiply(layer.out + first * found, count, found, by.o_proj, size, values, true);
    for (Index i = 0; i < count; i++)
        normalise(values + i * size, normed + i * size, size, by.second_epsilon);
    multiply(normed, count, size, by.gate, by.inner, gate);
    multiply(normed, count, size, by.up, by.inner, up);
    swish(gate, up, count * by.inner);
    multiply(gate, count, by.inner, by.down, size, values, true);
}

extern "C" void caldera_run_layer(const Step *step, const Layer *layer, const Matrices *by) {
#pragma omp parallel num_threads(step->threads)
    {
        std::vector<float> room;
#pragma omp for schedule(static)
        for (Index first = 0; first < step->tokens; first += ROWS)
            enter(*step, *layer, *by, first, std::min(ROWS, step->tokens - first), room);
        attend_all(*step, *layer);
#pragma omp for schedule(static)
        for (Index first = 0; first < step->tokens; first += ROWS)
            leave(*layer, *by, first, std::min(ROWS, step->tokens - first), room);
    }
}
