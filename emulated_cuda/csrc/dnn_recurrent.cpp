// cuDNN's recurrent layers: the layout of their weights, and the sizes of their workspaces, for which cuDNN
// cannot be asked without a device. The sizes are read off what cuDNN 9.19 asked for on an H100: 418 random
// layers in benchmarks/results/card-h100. The reserve is exact for all of them, the other workspace is
// wrong by 0.03 % in the median and by 7 % at most. On other cards and versions both are the best known.
#include "dnn.hpp"

#include <map>
#include <mutex>

enum : int { kRelu = 0, kTanh = 1, kLstm = 2, kGru = 3 };  // cudnnRNNMode_t
constexpr int kBadParameter = 2000;

// ---- The state of dropout, of which only its rate is needed ----

static std::mutex rates_lock;
static std::map<const void*, float>& rates() {
  static auto* found = new std::map<const void*, float>;  // libraries may still use it while the process ends
  return *found;
}
static int set_rate(const void* descriptor, float rate) {
  std::lock_guard<std::mutex> guard(rates_lock);
  return rates()[descriptor] = rate, kSuccess;
}
static float rate_of(const void* descriptor) {
  std::lock_guard<std::mutex> guard(rates_lock);
  auto found = rates().find(descriptor);
  return found == rates().end() ? 0 : found->second;
}
constexpr int64_t kGeneratorBytes = 24;  // of each thread that the card can hold
API int cudnnDropoutGetStatesSize(void*, size_t* size) {
  return *size = (size_t)(settings.multiprocessors * settings.threads_per_multiprocessor * kGeneratorBytes), kSuccess;
}
API int cudnnSetDropoutDescriptor(void* descriptor, void*, float rate, void*, size_t, unsigned long long) {
  return set_rate(descriptor, rate);
}
API int cudnnRestoreDropoutDescriptor(void* descriptor, void*, float rate, void*, size_t, unsigned long long) {
  return set_rate(descriptor, rate);
}

// ---- A layer ----

struct Layer {
  int algorithm = 0, mode = 0, bias = 0, is_bidirectional = 0, input_mode = 0, type = 0, precision = 0, math = 0;
  int32_t input = 0, hidden = 0, projected = 0, layers = 0;
  void* dropout = nullptr;
  uint32_t flags = 0;

  int64_t directions() const { return is_bidirectional ? 2 : 1; }
  int64_t gates() const { return mode == kLstm ? 4 : mode == kGru ? 3 : 1; }
  int64_t biases() const { return bias == 0 ? 0 : bias == 2 ? 2 : 1; }  // cudnnRNNBiasMode_t: none, input, double, recurrent
  int64_t element() const { return type == kDouble ? 8 : type == kFloat ? 4 : 2; }
  bool is_projected() const { return projected && projected != hidden; }
  int64_t output() const { return is_projected() ? projected : hidden; }
  int64_t width(int64_t layer) const { return layer ? directions() * output() : input; }
  // Elements of the weights of one direction of a layer.
  int64_t matrices(int64_t layer) const {
    return gates() * hidden * (width(layer) + output()) + (is_projected() ? (int64_t)projected * hidden : 0);
  }
  int64_t weights() const {
    int64_t sum = layers * directions() * biases() * gates() * hidden;
    for (int64_t layer = 0; layer < layers; ++layer) sum += directions() * matrices(layer);
    return sum;
  }
};
static Layer layer_of(void* descriptor) {
  Layer found;
  static auto get = real<int(void*, int*, int*, int*, int*, int*, int*, int*, int*, int32_t*, int32_t*, int32_t*, int32_t*,
                             void**, uint32_t*)>("cudnnGetRNNDescriptor_v8");
  get(descriptor, &found.algorithm, &found.mode, &found.bias, &found.is_bidirectional, &found.input_mode, &found.type,
      &found.precision, &found.math, &found.input, &found.hidden, &found.projected, &found.layers, &found.dropout,
      &found.flags);
  return found;
}

API int cudnnGetRNNWeightSpaceSize(void*, void* descriptor, size_t* size) {
  Layer layer = layer_of(descriptor);
  return *size = (size_t)(layer.weights() * layer.element()), kSuccess;
}

static int describe(void* descriptor, const Layer& layer, int64_t rows, int64_t columns) {
  int sizes[] = {1, (int)rows, (int)columns}, strides[] = {(int)(rows * columns), (int)columns, 1};
  static auto set = real<int(void*, int, int, const int*, const int*)>("cudnnSetTensorNdDescriptor");
  return set(descriptor, layer.type, 3, sizes, strides);
}

// All matrices come first, those of a layer and direction together, then all biases.
API int cudnnGetRNNWeightParams(void*, void* descriptor, int32_t part, size_t, void* space, int32_t linear, void* matrix,
                                void** matrix_address, void* bias, void** bias_address) {
  Layer layer = layer_of(descriptor);
  int64_t gates = layer.gates(), parts = layer.layers * layer.directions(), element = layer.element();
  bool is_projection = linear == 2 * gates, is_recurrent = linear >= gates;
  if (part < 0 || part >= parts || linear < 0 || linear > 2 * gates || (is_projection && !layer.is_projected()))
    return kBadParameter;
  auto layer_at = [&](int64_t index) { return index / layer.directions(); };
  int64_t before = 0, biases_begin = 0;
  for (int64_t index = 0; index < parts; ++index) {
    if (index < part) before += layer.matrices(layer_at(index));
    biases_begin += layer.matrices(layer_at(index));
  }
  int64_t width = layer.width(layer_at(part)), hidden = layer.hidden;
  int64_t recurrent = before + gates * hidden * width;
  int64_t at = is_projection  ? recurrent + gates * hidden * layer.output()
               : is_recurrent ? recurrent + (linear - gates) * hidden * layer.output()
                              : before + linear * hidden * width;
  int64_t rows = is_projection ? layer.projected : hidden;
  int64_t columns = is_projection ? hidden : is_recurrent ? layer.output() : width;
  if (matrix_address) *matrix_address = (char*)space + at * element;
  if (int status = matrix ? describe(matrix, layer, rows, columns) : kSuccess) return status;
  if (!bias || !bias_address) return kSuccess;
  *bias_address = nullptr;
  bool has_bias = layer.bias == 2 || (layer.bias == 1 && !is_recurrent) || (layer.bias == 3 && is_recurrent);
  if (is_projection || !has_bias) return kSuccess;
  int64_t index = layer.bias == 2 ? linear : linear % gates;
  *bias_address = (char*)space + (biases_begin + (part * layer.biases() * gates + index) * hidden) * element;
  return describe(bias, layer, hidden, 1);
}

// ---- Workspaces ----

static int64_t aligned(int64_t bytes) { return ceil_divided(bytes, 32) * 32; }

// What the forward pass keeps for the backward pass: states and gates of each layer and direction, the
// outputs between layers, and which elements of those were dropped, one bit for each.
static int64_t reserve_bytes(const Layer& layer, int64_t places) {
  int64_t elements = places * layer.hidden, one = elements * layer.element();
  int64_t parts = layer.layers * layer.directions(), between = (layer.layers - 1) * layer.directions();
  int64_t kept = layer.mode == kLstm ? 5 : layer.mode == kGru ? 6 : 1;
  int64_t sum = 256 + aligned(kept * parts * one) + aligned(between * one);
  if (rate_of(layer.dropout) > 0) sum += between * aligned(ceil_divided(elements * layer.directions(), 8));
  return sum;
}

// A linear rule: multiples of the bytes of one direction's outputs, and of the inputs.
struct Multiples {
  int64_t outputs, inputs;
};
// The matrices, 8 MiB for each layer and direction, and buffers for all places and for one step; those for
// all places serve one layer after another, so their size does not grow with the number of layers.
static int64_t workspace_bytes(const Layer& layer, int64_t longest, int64_t batch, bool is_training) {
  constexpr int kSmall = 3;  // CUDNN_RNN_ALGO_PERSIST_STATIC_SMALL_H, which bfloat16 has not
  bool is_both = layer.is_bidirectional, is_small = layer.algorithm == kSmall && layer.type != kBfloat16;
  int kind = layer.mode == kLstm ? 0 : layer.mode == kGru ? 1 : 2;
  Multiples take;
  if (!is_training) {
    constexpr int64_t kOutputs[][2] = {{5, 14}, {4, 12}, {2, 8}}, kMoreIfSmall[] = {16, 14, 4};
    take = {kOutputs[kind][is_both] + (is_small ? kMoreIfSmall[kind] : 0), 1};
  } else if (layer.input > layer.directions() * layer.hidden) {
    constexpr int64_t kMoreIfSmall[] = {12, 14, 9};
    int64_t each = 3 * layer.directions();
    take = {each + (is_small ? kMoreIfSmall[kind] : 0), each};
  } else if (is_small) {
    constexpr Multiples kTake[][2] = {{{21, 1}, {30, 1}}, {{18, 2}, {24, 2}}, {{13, 2}, {19, 2}}};
    take = kTake[kind][is_both];
  } else if (layer.layers > 1) {
    constexpr Multiples kTake[][2] = {{{5, 1}, {14, 1}}, {{4, 1}, {12, 1}}, {{4, 1}, {12, 1}}};
    take = kTake[kind][is_both];
  } else {
    constexpr Multiples kTake[][2] = {{{5, 1}, {14, 1}}, {{4, 2}, {12, 1}}, {{4, 2}, {10, 1}}};
    take = kTake[kind][is_both];
  }
  constexpr int64_t kSteps[][2] = {{10, 24}, {5, 14}, {5, 14}};
  int64_t step = batch * layer.hidden, steps = kSteps[kind][is_both] - (kind == 2 && !is_training && !is_both ? 1 : 0);
  int64_t elements = layer.weights() + longest * (take.outputs * step + take.inputs * batch * layer.input) +
                     steps * layer.layers * step;
  return (8 << 20) * layer.layers * layer.directions() + elements * layer.element();
}

API int cudnnGetRNNTempSpaceSizes(void*, void* descriptor, int mode, void* data, size_t* workspace, size_t* reserve) {
  Layer layer = layer_of(descriptor);
  int type = 0, layout = 0, longest = 0, batch = 0, width = 0;
  static auto get = real<int(void*, int*, int*, int*, int*, int*, int, int*, void*)>("cudnnGetRNNDataDescriptor");
  int lengths[1];
  double fill;
  if (int status = get(data, &type, &layout, &longest, &batch, &width, 0, lengths, &fill)) return status;
  bool is_training = mode != 0;
  if (workspace) *workspace = (size_t)workspace_bytes(layer, longest, batch, is_training);
  if (reserve) *reserve = is_training ? (size_t)reserve_bytes(layer, (int64_t)longest * batch) : 0;
  return kSuccess;
}
