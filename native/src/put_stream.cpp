#include "put_stream.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "pinned_shm.h"

namespace pdctl {
namespace {

constexpr size_t kViews = 512;  // Linux takes 1,024 in one call
constexpr uint32_t kMaxExtents = 1u << 16;

// One recv under the lock: some 200 us, the longest that `close` can have to wait.
constexpr uint64_t kStep = uint64_t{1} << 20;

// Inside a put a reader that waits sleeps until this much is there: woken for every segment it would
// cost both ends more time than the copying.
constexpr uint64_t kWake = uint64_t{1} << 19;

struct __attribute__((packed)) Prefix {
  uint64_t nonce;
  uint32_t count;
};

[[noreturn]] void fail(int number, const std::string& text) { throw SystemError(number, text); }

bool would_block(int number) { return number == EAGAIN || number == EWOULDBLOCK; }

// What a recv has returned: the bytes it got; 0 after waiting until there are some.
uint64_t received(int fd, ssize_t got) {
  if (got > 0) return static_cast<uint64_t>(got);
  if (got == 0) fail(ECONNRESET, "ended inside a put");
  if (would_block(errno)) {
    pollfd one{fd, POLLIN, 0};
    if (::poll(&one, 1, -1) >= 0) return 0;
  }
  if (errno != EINTR) fail(errno, std::strerror(errno));
  return 0;
}

void receive_all(int fd, void* into, size_t nbytes) {
  auto* at = static_cast<std::byte*>(into);
  for (size_t done = 0; done < nbytes;) {
    done += received(fd, ::recv(fd, at + done, nbytes - done, MSG_DONTWAIT));
  }
}

// How many bytes make poll return; 1, as at first, again in the end.
class LowWater {
 public:
  explicit LowWater(int fd) : fd_(fd) {}
  LowWater(const LowWater&) = delete;
  LowWater& operator=(const LowWater&) = delete;
  ~LowWater() { set(1); }

  // Without effect on the bytes: where it fails, poll returns earlier.
  void set(uint64_t bytes) {
    const auto mark = static_cast<int>(std::min(bytes, kWake));
    const int error = errno;  // of the recv before
    if (mark != mark_) ::setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &mark, sizeof mark);
    mark_ = mark;
    errno = error;
  }

 private:
  const int fd_;
  int mark_ = 1;
};

// MSG_TRUNC: TCP drops the bytes and writes nothing.
ssize_t discard_some(int fd, uint64_t most) {
  return ::recv(fd, nullptr, most, MSG_DONTWAIT | MSG_TRUNC);
}

// Where in a list of pieces of memory the next byte is.
class Cursor {
 public:
  explicit Cursor(std::vector<iovec> pieces) : pieces_(std::move(pieces)) {}

  bool done() const { return next_ == pieces_.size(); }

  // For sendmsg: everything that is left, as much as one call takes.
  msghdr all() {
    msghdr message{};
    message.msg_iov = pieces_.data() + next_;
    message.msg_iovlen = std::min(pieces_.size() - next_, kViews);
    return message;
  }

  // For recvmsg: at most `most` bytes.
  msghdr some(std::array<iovec, kViews>& views, uint64_t most) const {
    size_t used = 0;
    for (size_t i = next_; i < pieces_.size() && used < kViews && most > 0; ++i, ++used) {
      views[used] = iovec{pieces_[i].iov_base, std::min<uint64_t>(pieces_[i].iov_len, most)};
      most -= views[used].iov_len;
    }
    msghdr message{};
    message.msg_iov = views.data();
    message.msg_iovlen = used;
    return message;
  }

  void advance(uint64_t bytes) {
    while (bytes > 0) {
      iovec& piece = pieces_[next_];
      const uint64_t step = std::min<uint64_t>(bytes, piece.iov_len);
      piece.iov_base = static_cast<std::byte*>(piece.iov_base) + step;
      piece.iov_len -= step;
      bytes -= step;
      if (piece.iov_len == 0) ++next_;
    }
  }

 private:
  std::vector<iovec> pieces_;
  size_t next_ = 0;
};

std::vector<Extent> destinations(const Run* runs, size_t count) {
  std::vector<Extent> joined;
  for (size_t i = 0; i < count; ++i) {
    const Run& run = runs[i];
    if (!joined.empty() && joined.back().offset + joined.back().length == run.dst_offset) {
      joined.back().length += run.length;
    } else {
      joined.push_back({run.dst_offset, run.length});
    }
  }
  return joined;
}

}  // namespace

uint64_t PutHeader::nbytes() const {
  uint64_t total = 0;
  for (const Extent& extent : extents) total += static_cast<uint64_t>(extent.length);
  return total;
}

int64_t first_bad_source(const Run* runs, size_t count, uint64_t nbytes) {
  for (size_t i = 0; i < count; ++i) {
    const int64_t offset = runs[i].src_offset, length = runs[i].length;
    if (offset < 0 || length <= 0 || static_cast<uint64_t>(offset) > nbytes ||
        static_cast<uint64_t>(length) > nbytes - static_cast<uint64_t>(offset)) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

void send_put(int fd, uint64_t nonce, const std::byte* memory, const Run* runs, size_t count) {
  std::vector<Extent> extents = destinations(runs, count);
  Prefix prefix{nonce, static_cast<uint32_t>(extents.size())};
  std::vector<iovec> pieces{{&prefix, sizeof prefix},
                            {extents.data(), extents.size() * sizeof(Extent)}};
  for (size_t i = 0; i < count; ++i) {
    // sendmsg takes memory that it could write to, and does not.
    pieces.push_back({const_cast<std::byte*>(memory) + runs[i].src_offset,
                      static_cast<size_t>(runs[i].length)});
  }
  Cursor cursor(std::move(pieces));
  while (!cursor.done()) {
    const msghdr message = cursor.all();
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent >= 0) {
      cursor.advance(static_cast<uint64_t>(sent));
    } else if (errno != EINTR) {
      const int number = would_block(errno) ? ETIMEDOUT : errno;
      fail(number, std::strerror(number));
    }
  }
}

std::optional<PutHeader> receive_header(int fd) {
  Prefix prefix{};
  for (;;) {
    const ssize_t got = ::recv(fd, &prefix, 1, MSG_DONTWAIT);
    if (got == 0) return std::nullopt;
    if (received(fd, got) > 0) break;
  }
  receive_all(fd, reinterpret_cast<std::byte*>(&prefix) + 1, sizeof prefix - 1);
  if (prefix.count == 0 || prefix.count > kMaxExtents) {
    fail(EPROTO, "a header with " + std::to_string(prefix.count) + " runs");
  }
  PutHeader put{prefix.nonce, std::vector<Extent>(prefix.count)};
  receive_all(fd, put.extents.data(), put.extents.size() * sizeof(Extent));
  for (const Extent& extent : put.extents) {
    if (extent.length <= 0) fail(EPROTO, "a run of no bytes");
  }
  return put;
}

void discard_put(int fd, const PutHeader& put) {
  for (uint64_t left = put.nbytes(); left > 0;) left -= received(fd, discard_some(fd, left));
}

Landing::Landing(std::byte* memory, uint64_t nbytes, uint64_t block_bytes,
                 const std::vector<int64_t>& blocks)
    : memory_(memory),
      block_bytes_(block_bytes),
      blocks_(blocks.size()) {
  const uint64_t room = nbytes / block_bytes;
  for (const int64_t block : blocks) {
    if (block < 0 || static_cast<uint64_t>(block) >= room) {
      throw std::invalid_argument("block " + std::to_string(block) + " is outside of the memory's " +
                                  std::to_string(room) + " blocks");
    }
    number_of_.emplace(block, number_of_.size());
  }
}

void Landing::close() {
  open_.store(false, std::memory_order_release);
  const std::lock_guard<std::mutex> lock(writing_);
}

bool Landing::split(const Extent& extent, std::vector<Part>& parts) const {
  const auto size = static_cast<int64_t>(block_bytes_);
  int64_t at = extent.offset, left = extent.length;
  if (at < 0) return false;
  while (left > 0) {
    const auto found = number_of_.find(at / size);
    if (found == number_of_.end()) return false;
    const int64_t length = std::min(left, size - at % size);
    parts.push_back({found->second, {at % size, length}});
    at += length;
    left -= length;
  }
  return true;
}

bool Landing::Claimed::add(const Extent& extent) {
  const int64_t start = extent.offset;
  int64_t end = start + extent.length;
  const auto after = end_of_.upper_bound(start);
  if (after != end_of_.end() && after->first < end) return false;
  const auto before = after == end_of_.begin() ? end_of_.end() : std::prev(after);
  if (before != end_of_.end() && before->second > start) return false;
  if (after != end_of_.end() && after->first == end) {
    end = after->second;
    end_of_.erase(after);
  }
  if (before != end_of_.end() && before->second == start) {
    before->second = end;
  } else {
    end_of_.emplace(start, end);
  }
  return true;
}

std::string Landing::claim(const PutHeader& put) {
  const std::lock_guard<std::mutex> lock(counting_);
  // Extent by extent: those that overlap must not add up to more parts than there are bytes.
  std::vector<Part> parts;
  for (const Extent& extent : put.extents) {
    parts.clear();
    if (!split(extent, parts)) return "not blocks of its reservation";
    for (const Part& part : parts) {
      if (!blocks_[part.number].claimed.add(part.within)) {
        return "bytes of its reservation that came already";
      }
    }
  }
  return "";
}

void Landing::receive(int fd, const PutHeader& put) {
  std::vector<iovec> pieces;
  std::vector<Part> parts;
  for (const Extent& extent : put.extents) {
    pieces.push_back({memory_ + extent.offset, static_cast<size_t>(extent.length)});
    split(extent, parts);
  }
  Cursor cursor(std::move(pieces));
  std::array<iovec, kViews> views;
  size_t first = 0;
  uint64_t left = put.nbytes();
  LowWater low_water(fd);
  while (!cursor.done()) {
    const msghdr wanted = cursor.some(views, kStep);
    ssize_t got = 0;
    {
      const std::lock_guard<std::mutex> lock(writing_);
      if (open_.load(std::memory_order_acquire)) {
        msghdr message = wanted;
        got = ::recvmsg(fd, &message, MSG_DONTWAIT);
      } else {
        got = discard_some(fd, views[0].iov_len);
      }
    }
    if (got < 0) low_water.set(left);
    const uint64_t more = received(fd, got);
    left -= more;
    cursor.advance(more);
    arrived(parts, first, more);
  }
}

void Landing::arrived(std::vector<Part>& parts, size_t& first, uint64_t bytes) {
  if (bytes == 0) return;
  const std::lock_guard<std::mutex> lock(counting_);
  while (bytes > 0) {
    Part& part = parts[first];
    const uint64_t step = std::min(bytes, static_cast<uint64_t>(part.within.length));
    blocks_[part.number].here += step;
    part.within.length -= static_cast<int64_t>(step);
    bytes -= step;
    if (part.within.length == 0) ++first;
  }
  uint64_t complete = complete_.load(std::memory_order_relaxed);
  while (complete < blocks_.size() && blocks_[complete].here == block_bytes_) ++complete;
  complete_.store(complete, std::memory_order_release);
}

}  // namespace pdctl
