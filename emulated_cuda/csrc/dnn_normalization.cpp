// Workspaces of cuDNN's batch normalisation in training. cuDNN has no way to ask for their sizes without
// a device. In NCHW without a fused activation it needs none, and no reserve; the sizes for channels
// last are those that cuDNN 9.19 asked for on an H100, of which all in benchmarks/results/card-h100
// (67 shapes, in single and half precision) follow one rule. On other cards and versions it is the best known.
#include "dnn.hpp"

constexpr int kPersistent = 2;  // CUDNN_BATCHNORM_SPATIAL_PERSISTENT, which torch asks for with channels last

// A block of threads reduces a tile of channels over some rows; a row is one place in one sample. Each
// tile writes two sums for each of its channels.
struct Tiles {
  int64_t channels, width, rows, count;  // tiles side by side, channels of one, rows, and how many one behind the other
};
static bool find_tiles(const void* descriptor, int mode, bool is_forward, Tiles* tiles) {
  DnnTensor x = described(descriptor);
  if (mode != kPersistent || x.dimensions < 4 || x.strides[1] != 1) return false;
  int64_t channels = x.sizes[1], rows = x.sizes[0];
  for (int i = 2; i < x.dimensions; ++i) rows *= x.sizes[i];
  int64_t together = channels % 4 ? 1 : 4;  // channels that one thread reads at once
  int64_t threads = channels % 4 && channels <= 4 ? 4 : 16;
  int64_t places = !is_forward ? 1536 : x.type == kFloat ? 1024 : 2560;
  tiles->width = threads * together;
  tiles->channels = ceil_divided(channels, tiles->width);
  tiles->rows = places / threads;
  tiles->count = ceil_divided(rows, tiles->rows) * tiles->channels;
  return true;
}
static int64_t kept_bytes(const Tiles& tiles) { return 8 * settings.multiprocessors + 4 * tiles.channels; }

API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int mode, int, void* x, void*, void*, void*,
                                                                 void*, size_t* size) {
  Tiles tiles;
  if (!find_tiles(x, mode, true, &tiles)) return *size = 0, kSuccess;
  *size = (size_t)(tiles.count * (8 * tiles.width + 4) + kept_bytes(tiles) + 16);
  return kSuccess;
}
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int mode, int, void* x, void*, void*, void*, void*,
                                                          void*, void*, size_t* size) {
  Tiles tiles;
  if (!find_tiles(x, mode, false, &tiles)) return *size = 0, kSuccess;
  *size = (size_t)(tiles.count * 8 * tiles.width + kept_bytes(tiles));
  return kSuccess;
}
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*, size_t* size) {
  return *size = 0, kSuccess;
}
