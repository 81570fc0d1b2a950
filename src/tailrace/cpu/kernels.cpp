// Passes over activations, each over memory once. Built on the user's machine by `build.py`, called by `kernels.py`.
//
// All arrays are contiguous. A `bfloat` is the upper half of a float; arithmetic is in float throughout, and results
// are rounded to the nearest, ties to even, once, where they are stored. One thread: the caller's.

#include <cstdint>
#include <cstring>
#include <vector>

#include <cmath>

namespace {

struct bfloat {
  uint16_t bits;
};

inline float load(float value) { return value; }
inline float load(bfloat value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

inline void store(float *where, float value) { *where = value; }
inline void store(bfloat *where, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  where->bits = uint16_t(value != value ? 0x7fc0 : rounded);
}

// exp(x) = 2^n e^r with r = x - n ln 2, |r| <= ln 2 / 2; Taylor to degree 7 leaves 5e-9 of it. Clamped to floats.
inline float exponential(float x) {
  x = x > 88.0f ? 88.0f : x;
  x = x < -87.0f ? -87.0f : x;
  float n = __builtin_rintf(x * 1.44269504f);
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  int32_t bits = (int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

constexpr int64_t kBlockRows = 64;  // rows whose gradient of a weight is added up before it joins the total's rounding

// sum = stream + delta;  y = sum / rms(sum) * w, and 1 / rms(sum) for the gradient. `delta` and `inverse` may be null.
template <class T>
void add_norm(const float *stream, const T *delta, const float *weight, float epsilon, int64_t rows, int64_t size,
              float *sum, T *normed, float *inverse) {
  for (int64_t row = 0; row < rows; ++row, stream += size, sum += size, normed += size) {
    float squares = 0;
    if (delta) {
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < size; ++i) {
        float x = stream[i] + load(delta[i]);
        sum[i] = x;
        squares += x * x;
      }
      delta += size;
    } else {
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < size; ++i) squares += stream[i] * stream[i];
    }
    const float *x = delta ? sum : stream;
    float scale = 1.0f / std::sqrt(squares / float(size) + epsilon);
    if (inverse) inverse[row] = scale;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) store(normed + i, x[i] * scale * weight[i]);
  }
}

// dx = d_sum + (g w - x mean(g w x) / rms^2) / rms;  dw += sum over rows of g x / rms. `rounded` is dx as a T, or null.
template <class T>
void add_norm_backward(const float *sum, const float *inverse, const float *weight, const float *grad_sum,
                       const T *grad_normed, int64_t rows, int64_t size, float *grad, T *rounded, float *grad_weight) {
  std::vector<float> block(size);
  for (int64_t row = 0; row < rows; ++row) {
    const float *x = sum + row * size, *outer = grad_sum + row * size;
    const T *g = grad_normed + row * size;
    float *out = grad + row * size, *part = block.data(), scale = inverse[row], product = 0;
#pragma omp simd reduction(+ : product)
    for (int64_t i = 0; i < size; ++i) {
      float gx = load(g[i]) * x[i];
      part[i] += gx * scale;
      product += gx * weight[i];
    }
    float back = product * scale * scale * scale / float(size);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) out[i] = outer[i] + load(g[i]) * weight[i] * scale - x[i] * back;
    if (rounded) {
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) store(rounded + row * size + i, out[i]);
    }
    if (row % kBlockRows == kBlockRows - 1 || row == rows - 1) {
      for (int64_t i = 0; i < size; ++i) grad_weight[i] += part[i], part[i] = 0;
    }
  }
}

// [gate | up] -> silu(gate) up, silu(x) = x sigmoid(x).
template <class T>
void swiglu(const T *gate_up, int64_t rows, int64_t size, T *out) {
  for (int64_t row = 0; row < rows; ++row, gate_up += 2 * size, out += size) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      float gate = load(gate_up[i]);
      store(out + i, gate * sigmoid(gate) * load(gate_up[size + i]));
    }
  }
}

// d_gate = g up s (1 + gate (1 - s)),  d_up = g gate s,  s = sigmoid(gate).
template <class T>
void swiglu_backward(const T *gate_up, const T *grad_out, int64_t rows, int64_t size, T *grad) {
  for (int64_t row = 0; row < rows; ++row, gate_up += 2 * size, grad += 2 * size, grad_out += size) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      float gate = load(gate_up[i]), up = load(gate_up[size + i]), g = load(grad_out[i]);
      float s = sigmoid(gate);
      store(grad + i, g * up * s * (1.0f + gate * (1.0f - s)));
      store(grad + size + i, g * gate * s);
    }
  }
}

// One head of one token: x / rms(x) * w where there is a weight, then rotated: (a, b) -> (a cos - b sin, b cos + a sin)
// with a and b the halves of the head, all times `factor`.
template <class T>
inline void rotate_head(const T *x, const float *weight, float epsilon, const float *cosine, const float *sine,
                        int64_t size, float factor, T *out) {
  int64_t half = size / 2;
  float scale = factor;
  if (weight) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; ++i) squares += load(x[i]) * load(x[i]);
    scale = factor / std::sqrt(squares / float(size) + epsilon);
  }
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    float a = load(x[i]) * scale * (weight ? weight[i] : 1.0f);
    float b = load(x[half + i]) * scale * (weight ? weight[half + i] : 1.0f);
    store(out + i, a * cosine[i] - b * sine[i]);
    store(out + half + i, b * cosine[half + i] + a * sine[half + i]);
  }
}

// The gradient of it, added to `grad` where `adds`, else written; that of the weight is added to `grad_weight`.
template <class T>
inline void rotate_head_backward(const T *x, const float *weight, float epsilon, const float *cosine,
                                 const float *sine, int64_t size, float factor, const T *grad_out, bool adds, T *grad,
                                 float *grad_weight, float *turned) {
  int64_t half = size / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    float a = load(grad_out[i]), b = load(grad_out[half + i]);
    turned[i] = (a * cosine[i] + b * sine[half + i]) * factor;
    turned[half + i] = (b * cosine[half + i] - a * sine[i]) * factor;
  }
  float scale = 1.0f, back = 0.0f;
  if (weight) {
    float squares = 0, product = 0;
#pragma omp simd reduction(+ : squares, product)
    for (int64_t i = 0; i < size; ++i) {
      squares += load(x[i]) * load(x[i]);
      product += turned[i] * weight[i] * load(x[i]);
    }
    scale = 1.0f / std::sqrt(squares / float(size) + epsilon);
    back = product * scale * scale * scale / float(size);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      grad_weight[i] += turned[i] * load(x[i]) * scale;
      turned[i] = turned[i] * weight[i] * scale - load(x[i]) * back;
    }
  }
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) store(grad + i, turned[i] + (adds ? load(grad[i]) : 0.0f));
}

struct Heads {
  int64_t queries, keys, size;
  int64_t row() const { return (queries + 2 * keys) * size; }
};

// Packed [tokens, queries | keys | values] into padded groups [segments, heads, length, size], queries and keys rotated,
// queries scaled. `gather` [segments * length] names each place's token; -1 is padding and becomes 0.
template <class T>
void rotate_gather(const T *packed, const float *query_weight, const float *key_weight, float epsilon,
                   const float *cosine, const float *sine, Heads heads, float factor, const int64_t *gather,
                   int64_t segments, int64_t length, T *query, T *key, T *value) {
  int64_t size = heads.size;
  for (int64_t segment = 0; segment < segments; ++segment) {
    for (int64_t place = 0; place < length; ++place) {
      int64_t token = gather[segment * length + place];
      const T *x = packed + token * heads.row();
      for (int64_t head = 0; head < heads.queries + 2 * heads.keys; ++head, x += size) {
        bool is_query = head < heads.queries, is_key = !is_query && head < heads.queries + heads.keys;
        int64_t own = is_query ? head : is_key ? head - heads.queries : head - heads.queries - heads.keys;
        int64_t count = is_query ? heads.queries : heads.keys;
        T *out = (is_query ? query : is_key ? key : value) + ((segment * count + own) * length + place) * size;
        if (token < 0) {
          std::memset(out, 0, size * sizeof(T));
        } else if (is_query || is_key) {
          rotate_head(x, is_query ? query_weight : key_weight, epsilon, cosine + token * size, sine + token * size,
                      size, is_query ? factor : 1.0f, out);
        } else {
          std::memcpy(out, x, size * sizeof(T));
        }
      }
    }
  }
}

// Gradients of padded groups back to packed tokens, at the listed places only. A place's own token is written (`adds`
// is false), one that it borrows is added to; borrowed queries have none.
template <class T>
void rotate_gather_backward(const T *packed, const float *query_weight, const float *key_weight, float epsilon,
                            const float *cosine, const float *sine, Heads heads, float factor, const int64_t *places,
                            const int64_t *tokens, int64_t count, int64_t length, const T *grad_query,
                            const T *grad_key, const T *grad_value, int64_t adds, T *grad,
                            float *grad_query_weight, float *grad_key_weight) {
  int64_t size = heads.size;
  std::vector<float> turned(size);
  for (int64_t index = 0; index < count; ++index) {
    int64_t segment = places[index] / length, place = places[index] % length, token = tokens[index];
    const float *cos = cosine + token * size, *sin = sine + token * size;
    for (int64_t head = adds ? heads.queries : 0; head < heads.queries + 2 * heads.keys; ++head) {
      bool is_query = head < heads.queries, is_key = !is_query && head < heads.queries + heads.keys;
      int64_t own = is_query ? head : is_key ? head - heads.queries : head - heads.queries - heads.keys;
      int64_t same = is_query ? heads.queries : heads.keys;
      const T *g = (is_query ? grad_query : is_key ? grad_key : grad_value) +
                   ((segment * same + own) * length + place) * size;
      const T *x = packed + token * heads.row() + head * size;
      T *out = grad + token * heads.row() + head * size;
      if (is_query || is_key) {
        rotate_head_backward(x, is_query ? query_weight : key_weight, epsilon, cos, sin, size,
                             is_query ? factor : 1.0f, g, adds != 0, out, is_query ? grad_query_weight : grad_key_weight,
                             turned.data());
      } else if (adds) {
        for (int64_t i = 0; i < size; ++i) store(out + i, load(out[i]) + load(g[i]));
      } else {
        std::memcpy(out, g, size * sizeof(T));
      }
    }
  }
}

// Padded [segments, heads, length, size] to rows [tokens, heads * size] at the listed places, and back (`inward`).
template <class T>
void move_places(T *padded, T *rows, int64_t heads, int64_t size, const int64_t *places, const int64_t *tokens,
                 int64_t count, int64_t length, int64_t inward) {
  for (int64_t index = 0; index < count; ++index) {
    int64_t segment = places[index] / length, place = places[index] % length;
    for (int64_t head = 0; head < heads; ++head) {
      T *one = padded + ((segment * heads + head) * length + place) * size;
      T *other = rows + (tokens[index] * heads + head) * size;
      std::memcpy(inward ? one : other, inward ? other : one, size * sizeof(T));
    }
  }
}

// Packed tokens of a decoding engine: queries rotated and scaled to [tokens, queries, size]; keys, rotated, and values
// to their slot's place in a cache [slots, keys, room, size].
template <class T>
void rotate_store(const T *packed, const float *query_weight, const float *key_weight, float epsilon,
                  const float *cosine, const float *sine, Heads heads, float factor, const int64_t *slots,
                  const int64_t *positions, int64_t tokens, int64_t room, T *query, T *key_cache, T *value_cache) {
  int64_t size = heads.size;
  for (int64_t token = 0; token < tokens; ++token, cosine += size, sine += size) {
    const T *x = packed + token * heads.row();
    for (int64_t head = 0; head < heads.queries; ++head, x += size, query += size)
      rotate_head(x, query_weight, epsilon, cosine, sine, size, factor, query);
    for (int64_t head = 0; head < heads.keys; ++head, x += size) {
      int64_t place = ((slots[token] * heads.keys + head) * room + positions[token]) * size;
      rotate_head(x, key_weight, epsilon, cosine, sine, size, 1.0f, key_cache + place);
      std::memcpy(value_cache + place, x + heads.keys * size, size * sizeof(T));
    }
  }
}

// The largest number, and the numbers replaced by exp(x - largest); returns their sum.
inline float exponentials(float *x, int64_t count) {
  float largest = x[0], sum = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    x[i] = exponential(x[i] - largest);
    sum += x[i];
  }
  return sum;
}

// Scores [batch, rows, keys] of blocks of queries, in place: softmax over what a query sees, 0 elsewhere. Row r of a batch
// is the query at `start + r % block` and sees so many keys and its own.
template <class T>
void causal_softmax(T *scores, int64_t batch, int64_t rows, int64_t keys, int64_t block, int64_t start) {
  std::vector<float> wide(keys);
  for (int64_t row = 0; row < batch * rows; ++row, scores += keys) {
    int64_t seen = start + row % rows % block + 1;
#pragma omp simd
    for (int64_t i = 0; i < seen; ++i) wide[i] = load(scores[i]);
    float scale = 1.0f / exponentials(wide.data(), seen);
#pragma omp simd
    for (int64_t i = 0; i < seen; ++i) store(scores + i, wide[i] * scale);
    std::memset(scores + seen, 0, (keys - seen) * sizeof(T));
  }
}

// The gradient of scores, in place of that of probabilities p: p (g - sum of g p).
template <class T>
void causal_softmax_backward(const T *probabilities, T *grad, int64_t batch, int64_t rows, int64_t keys, int64_t block,
                             int64_t start) {
  for (int64_t row = 0; row < batch * rows; ++row, grad += keys, probabilities += keys) {
    int64_t seen = start + row % rows % block + 1;
    float mean = 0;
#pragma omp simd reduction(+ : mean)
    for (int64_t i = 0; i < seen; ++i) mean += load(grad[i]) * load(probabilities[i]);
#pragma omp simd
    for (int64_t i = 0; i < seen; ++i) store(grad + i, load(probabilities[i]) * (load(grad[i]) - mean));
    std::memset(grad + seen, 0, (keys - seen) * sizeof(T));
  }
}

// One token per row of logits at its temperature (0: the likeliest), and its log-probability: the first token at which
// the sum of weights passes `draws` of the total. What is not finite makes that NaN.
inline void sample_rows(const float *logits, int64_t rows, int64_t size, const float *temperatures, const double *draws,
                        int64_t *chosen, float *logprobs) {
  constexpr int64_t kBlock = 64;
  std::vector<float> weights(size);
  for (int64_t row = 0; row < rows; ++row, logits += size) {
    float scale = temperatures[row] > 0 ? 1.0f / temperatures[row] : 1.0f;
    float largest = logits[0];
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < size; ++i) largest = logits[i] > largest ? logits[i] : largest;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) weights[i] = exponential((logits[i] - largest) * scale);
    auto sum = [&](int64_t begin) {
      float part = 0;
      int64_t end = begin + kBlock < size ? begin + kBlock : size;
#pragma omp simd reduction(+ : part)
      for (int64_t i = begin; i < end; ++i) part += weights[i];
      return part;
    };
    double total = 0, passed = 0;
    for (int64_t begin = 0; begin < size; begin += kBlock) total += sum(begin);
    double point = temperatures[row] > 0 ? total * draws[row] : -1.0;
    int64_t begin = 0, token = 0;
    if (point < 0) {
      while (token < size - 1 && logits[token] != largest) ++token;
    } else {
      for (; begin + kBlock < size && passed + sum(begin) <= point; begin += kBlock) passed += sum(begin);
      for (token = begin; token < size - 1 && (passed += weights[token]) <= point;) ++token;
    }
    chosen[row] = token;
    logprobs[row] = (logits[token] - largest) * scale - float(std::log(total));
  }
}

// One query per row over the row's own cache: [rows, queries, size].
template <class T>
void decode_any(const T *query, const T *key_cache, const T *value_cache, const int64_t *lengths, int64_t rows,
                  Heads heads, int64_t room, T *out) {
  int64_t size = heads.size, shared = heads.queries / heads.keys;
  std::vector<float> scores(shared * room), wide(shared * size), sums(shared * size);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t count = lengths[row];
    for (int64_t head = 0; head < heads.keys; ++head) {
      const T *keys = key_cache + (row * heads.keys + head) * room * size;
      const T *values = value_cache + (row * heads.keys + head) * room * size;
      const T *own = query + (row * heads.queries + head * shared) * size;
      T *result = out + (row * heads.queries + head * shared) * size;
      for (int64_t i = 0; i < shared * size; ++i) wide[i] = load(own[i]), sums[i] = 0;
      for (int64_t past = 0; past < count; ++past) {
        const T *key = keys + past * size;
        for (int64_t q = 0; q < shared; ++q) {
          float product = 0;
#pragma omp simd reduction(+ : product)
          for (int64_t i = 0; i < size; ++i) product += wide[q * size + i] * load(key[i]);
          scores[q * room + past] = product;
        }
      }
      for (int64_t q = 0; q < shared; ++q) {
        float total = 1.0f / exponentials(&scores[q * room], count);
        for (int64_t past = 0; past < count; ++past) scores[q * room + past] *= total;
      }
      for (int64_t past = 0; past < count; ++past) {
        const T *value = values + past * size;
        for (int64_t q = 0; q < shared; ++q) {
          float weight = scores[q * room + past];
#pragma omp simd
          for (int64_t i = 0; i < size; ++i) sums[q * size + i] += weight * load(value[i]);
        }
      }
      for (int64_t i = 0; i < shared * size; ++i) store(result + i, sums[i]);
    }
  }
}

// Sixteen lanes at a time, in pairs of vectors: two neighbours, or, of bfloats, those at even and those at odd places.
typedef float vector __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
constexpr int64_t kLanes = 16, kPair = 2 * kLanes;

struct Pair {
  vector first, second;
};

inline Pair load_pair(const float *from) {
  Pair pair;
  std::memcpy(&pair, from, sizeof pair);
  return pair;
}
inline Pair load_pair(const bfloat *from) {
  words both;
  std::memcpy(&both, from, sizeof both);
  return {(vector)(both << 16), (vector)(both & 0xffff0000)};
}
inline void store_pair(float *to, Pair pair) { std::memcpy(to, &pair, sizeof pair); }
inline void store_pair(bfloat *to, Pair pair) {
  for (int64_t i = 0; i < kLanes; ++i) store(to + 2 * i, pair.first[i]), store(to + 2 * i + 1, pair.second[i]);
}

inline float sum_lanes(vector lanes) {
  typedef float half __attribute__((vector_size(32)));
  typedef float quarter __attribute__((vector_size(16)));
  half halves[2];
  std::memcpy(halves, &lanes, sizeof halves);
  halves[0] += halves[1];
  quarter quarters[2];
  std::memcpy(quarters, halves, sizeof quarters);
  quarters[0] += quarters[1];
  return (quarters[0][0] + quarters[0][2]) + (quarters[0][1] + quarters[0][3]);
}

// The same for the usual sizes, with queries and sums in registers: what reads bfloats is bound by arithmetic.
template <class T, int64_t kSize, int64_t kShared>
void decode_heads(const T *query, const T *key_cache, const T *value_cache, const int64_t *lengths, int64_t rows,
                  Heads heads, int64_t room, T *out) {
  constexpr int64_t kParts = kSize / kPair;
  std::vector<float> scores(kShared * room);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t count = lengths[row];
    for (int64_t head = 0; head < heads.keys; ++head) {
      int64_t begin = (row * heads.keys + head) * room * kSize;
      int64_t place = (row * heads.queries + head * kShared) * kSize;
      const T *keys = key_cache + begin, *values = value_cache + begin;
      Pair own[kShared][kParts], sums[kShared][kParts] = {};
      for (int64_t q = 0; q < kShared; ++q)
        for (int64_t i = 0; i < kParts; ++i) own[q][i] = load_pair(query + place + q * kSize + i * kPair);
      for (int64_t past = 0; past < count; ++past) {
        const T *key = keys + past * kSize;
        vector products[kShared] = {};
#pragma GCC unroll 8
        for (int64_t i = 0; i < kParts; ++i) {
          Pair part = load_pair(key + i * kPair);
#pragma GCC unroll 8
          for (int64_t q = 0; q < kShared; ++q)
            products[q] += own[q][i].first * part.first + own[q][i].second * part.second;
        }
#pragma GCC unroll 8
        for (int64_t q = 0; q < kShared; ++q) scores[q * room + past] = sum_lanes(products[q]);
      }
      float scales[kShared];
      for (int64_t q = 0; q < kShared; ++q) scales[q] = 1.0f / exponentials(&scores[q * room], count);
      for (int64_t past = 0; past < count; ++past) {
        const T *value = values + past * kSize;
#pragma GCC unroll 8
        for (int64_t i = 0; i < kParts; ++i) {
          Pair part = load_pair(value + i * kPair);
#pragma GCC unroll 8
          for (int64_t q = 0; q < kShared; ++q) {
            float weight = scores[q * room + past];
            sums[q][i].first += weight * part.first;
            sums[q][i].second += weight * part.second;
          }
        }
      }
      for (int64_t q = 0; q < kShared; ++q)
        for (int64_t i = 0; i < kParts; ++i)
          store_pair(out + place + q * kSize + i * kPair,
                     {sums[q][i].first * scales[q], sums[q][i].second * scales[q]});
    }
  }
}

template <class T>
void decode(const T *query, const T *key_cache, const T *value_cache, const int64_t *lengths, int64_t rows,
            Heads heads, int64_t room, T *out) {
  int64_t shared = heads.queries / heads.keys;
  auto run = decode_any<T>;
  if (heads.size == 64)
    run = shared == 1   ? decode_heads<T, 64, 1>
          : shared == 2 ? decode_heads<T, 64, 2>
          : shared == 3 ? decode_heads<T, 64, 3>
          : shared == 4 ? decode_heads<T, 64, 4>
                        : run;
  if (heads.size == 128)
    run = shared == 1 ? decode_heads<T, 128, 1> : shared == 2 ? decode_heads<T, 128, 2> : run;
  run(query, key_cache, value_cache, lengths, rows, heads, room, out);
}

}  // namespace

// Addresses for `kernels.py`.
#define EXPORT(NAME) void *NAME##_float32 = (void *)NAME<float>, *NAME##_bfloat16 = (void *)NAME<bfloat>;

extern "C" {
EXPORT(add_norm)
EXPORT(add_norm_backward)
EXPORT(swiglu)
EXPORT(swiglu_backward)
EXPORT(rotate_gather)
EXPORT(rotate_gather_backward)
EXPORT(move_places)
EXPORT(rotate_store)
EXPORT(causal_softmax)
EXPORT(causal_softmax_backward)
EXPORT(decode)
void *sample_float32 = (void *)sample_rows;
}
