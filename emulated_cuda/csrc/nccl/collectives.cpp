// The collectives. In each round a rank writes a part of its data into its slot, meets the others, and
// reads what it needs from all slots. Rounds take two sets of slots in turn, so that a rank that is
// ahead does not overwrite what others still read.
#include "collectives.hpp"

#include <algorithm>
#include <cstring>

#include "reductions.hpp"

namespace {
// Whether only the meeting takes place: without values large messages have no content.
bool is_empty(size_t bytes) { return !bytes || (!values_are_computed && bytes > kShortMessage); }

// Exchanges `bytes` in parts of `most` bytes. For each part, `show(slot, done, part)` writes it into this rank's
// slot of the shared memory, and when all ranks have done so, `take(done, part)` reads the slots of the others.
template <class Show, class Take>
int in_rounds(Communicator& c, const Call& call, size_t bytes, size_t most, Show show, Take take,
              bool needs_others = true) {
  if (is_empty(bytes)) return c.meet(&call);
  for (size_t done = 0; done < bytes; done += most) {
    size_t part = std::min(most, bytes - done);
    show(c.own_slot(), done, part);
    if (int code = c.meet(done ? nullptr : &call, needs_others)) return code;
    if (int code = take(done, part)) return code;
    c.use_other_slots();
  }
  return kDone;
}
std::vector<const char*> slots_of(Communicator& c, size_t offset) {
  std::vector<const char*> found;
  for (int rank = 0; rank < c.ranks(); ++rank) found.push_back(c.slot(rank) + offset);
  return found;
}
auto shows(const void* send) {
  return [from = (const char*)send](char* slot, size_t done, size_t part) { memcpy(slot, from + done, part); };
}
Call call_of(const char* name, size_t count, int type, int op = -1, int root = -1) {
  Call call{};
  strncpy(call.name, name, sizeof call.name - 1);
  call.count = (int64_t)count;
  call.type = type, call.op = std::min<int>(op, kFirstOwnOp), call.root = root;
  return call;
}
}  // namespace

int all_reduce(Communicator& c, const void* send, void* recv, size_t count, int type, int op, double factor) {
  size_t width = width_of(type);
  // Each rank reduces a part of what is shown, and shows the result in the next round.
  auto take = [&](size_t done, size_t part) {
    size_t each = round_up(part / width, c.ranks()) / c.ranks() * width;
    auto piece = [&](int rank) {
      size_t first = std::min(part, rank * each);
      return std::make_pair(first, std::min(part, first + each) - first);
    };
    auto own = piece(c.rank());
    auto from = slots_of(c, own.first);
    c.use_other_slots();
    reduce(type, op, factor, from, own.second / width, c.own_slot());
    if (int code = c.meet()) return code;
    for (int rank = 0; rank < c.ranks(); ++rank)
      memcpy((char*)recv + done + piece(rank).first, c.slot(rank), piece(rank).second);
    return (int)kDone;
  };
  return in_rounds(c, call_of("ncclAllReduce", count, type, op), count * width, kSlot, shows(send), take);
}

int reduce_to(Communicator& c, const void* send, void* recv, size_t count, int type, int op, double factor, int root) {
  size_t width = width_of(type);
  auto take = [&](size_t done, size_t part) {
    if (c.rank() == root) reduce(type, op, factor, slots_of(c, 0), part / width, (char*)recv + done);
    return (int)kDone;
  };
  return in_rounds(c, call_of("ncclReduce", count, type, op, root), count * width, kSlot, shows(send), take);
}

int broadcast(Communicator& c, const void* send, void* recv, size_t count, int type, int root) {
  auto show = [&](char* slot, size_t done, size_t part) {
    if (c.rank() == root) memcpy(slot, (const char*)send + done, part);
  };
  auto take = [&](size_t done, size_t part) { return memcpy((char*)recv + done, c.slot(root), part), (int)kDone; };
  // What fits in the buffers leaves the root of a card, too, without the others.
  size_t bytes = count * width_of(type);
  bool needs_others = c.rank() != root || bytes > kSlot;
  return in_rounds(c, call_of("ncclBroadcast", count, type, -1, root), bytes, kSlot, show, take, needs_others);
}

int all_gather(Communicator& c, const void* send, void* recv, size_t count, int type) {
  size_t bytes = count * width_of(type);
  auto take = [&](size_t done, size_t part) {
    for (int rank = 0; rank < c.ranks(); ++rank) memcpy((char*)recv + rank * bytes + done, c.slot(rank), part);
    return (int)kDone;
  };
  return in_rounds(c, call_of("ncclAllGather", count, type), bytes, kSlot, shows(send), take);
}

int gather_to(Communicator& c, const void* send, void* recv, size_t count, int type, int root) {
  size_t bytes = count * width_of(type);
  auto take = [&](size_t done, size_t part) {
    for (int rank = 0; rank < c.ranks() && c.rank() == root; ++rank)
      memcpy((char*)recv + rank * bytes + done, c.slot(rank), part);
    return (int)kDone;
  };
  return in_rounds(c, call_of("ncclGather", count, type, -1, root), bytes, kSlot, shows(send), take);
}

// In a round, a rank shows a part of what it has for each rank.
template <class Take>
static int by_target(Communicator& c, const Call& call, const void* send, size_t bytes, Take take) {
  size_t most = kSlot / c.ranks() / 64 * 64;
  auto show = [&](char* slot, size_t done, size_t part) {
    for (int rank = 0; rank < c.ranks(); ++rank)
      memcpy(slot + rank * most, (const char*)send + rank * bytes + done, part);
  };
  return in_rounds(c, call, bytes, most, show, [&](size_t done, size_t part) {
    return take(slots_of(c, c.rank() * most), done, part), (int)kDone;
  });
}

int reduce_scatter(Communicator& c, const void* send, void* recv, size_t count, int type, int op, double factor) {
  size_t width = width_of(type);
  auto take = [&](const std::vector<const char*>& from, size_t done, size_t part) {
    reduce(type, op, factor, from, part / width, (char*)recv + done);
  };
  return by_target(c, call_of("ncclReduceScatter", count, type, op), send, count * width, take);
}

int all_to_all(Communicator& c, const void* send, void* recv, size_t count, int type) {
  size_t bytes = count * width_of(type);
  auto take = [&](const std::vector<const char*>& from, size_t done, size_t part) {
    for (int rank = 0; rank < c.ranks(); ++rank) memcpy((char*)recv + rank * bytes + done, from[rank], part);
  };
  return by_target(c, call_of("ncclAlltoAll", count, type), send, bytes, take);
}

// ---- Between two ranks ----

namespace {
constexpr size_t kHead = 8;  // the length of the message stands before it
constexpr uint64_t kKnown = 1ull << 63;  // in the head: what is sent is known

struct Moving {
  Transfer transfer;
  size_t bytes, done = 0;  // with the head
  uint64_t head;
};

// Moves what there is room for; true if that was anything.
bool advance(Communicator& c, Moving& moving, std::string& problem) {
  const Transfer& transfer = moving.transfer;
  Ring& way = transfer.sends ? c.ring(c.rank(), transfer.peer) : c.ring(transfer.peer, c.rank());
  uint64_t written = way.written, read = way.read;
  uint64_t at = transfer.sends ? written : read;
  size_t room = transfer.sends ? kRing - (written - read) : written - read;
  bool in_head = moving.done < kHead;
  char* own = in_head ? (char*)&moving.head + moving.done : transfer.at + (moving.done - kHead);
  size_t left = (in_head ? kHead : moving.bytes) - moving.done;
  size_t part = std::min({room, left, (size_t)(kRing - at % kRing)});
  if (!part) return false;
  char* shared = way.data + at % kRing;
  if (transfer.sends) memcpy(shared, own, part), way.written += part;
  else memcpy(own, shared, part), way.read += part;
  moving.done += part;
  uint64_t told = moving.head & ~kKnown;
  if (moving.done == kHead && told != transfer.bytes)
    problem = "the ranks expect different sizes of a message: rank " + std::to_string(transfer.peer) + " sends " +
              std::to_string(told) + " bytes, but rank " + std::to_string(c.rank()) + " receives " +
              std::to_string(transfer.bytes);
  if (moving.done == moving.bytes && !transfer.sends && moving.head & kKnown)
    note_write(transfer.at, transfer.bytes, transfer.launches);
  return true;
}
}  // namespace

int move(Communicator& c, const std::vector<Transfer>& transfers) {
  std::vector<Moving> all;
  for (const Transfer& transfer : transfers)
    all.push_back({transfer, kHead + (is_empty(transfer.bytes) ? 0 : transfer.bytes), 0,
                   transfer.bytes | (transfer.is_known ? kKnown : 0)});
  size_t waiting_for = 0;
  std::string problem;
  // Messages between two ranks keep their order; others move as they can.
  auto advance_all = [&] {
    bool has_moved = false, is_left = false;
    std::vector<std::pair<int, bool>> blocked;
    for (size_t i = 0; i < all.size() && problem.empty(); ++i) {
      auto way = std::make_pair(all[i].transfer.peer, all[i].transfer.sends);
      if (all[i].done == all[i].bytes || std::find(blocked.begin(), blocked.end(), way) != blocked.end()) continue;
      while (all[i].done < all[i].bytes && problem.empty() && advance(c, all[i], problem)) has_moved = true;
      if (all[i].done < all[i].bytes) blocked.push_back(way), waiting_for = i, is_left = true;
    }
    if (has_moved) c.ring_bell();
    return !is_left || !problem.empty();
  };
  auto missing = [&] { return all[waiting_for].transfer.peer; };
  if (int code = c.wait_until(advance_all, missing, "ncclSend or ncclRecv")) return code;
  return problem.empty() ? (int)kDone : c.fail_all(kInvalidUsage, problem);
}
