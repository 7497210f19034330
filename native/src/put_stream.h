// Puts over a stream socket: a header {nonce, count, count x (destination offset, length)}, then the
// bytes, straight between two memories. Knows blocks and nonces, not peers or requests.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "copy_runs.h"

namespace pdctl {

struct Extent {
  int64_t offset;
  int64_t length;
};

struct PutHeader {
  uint64_t nonce;
  std::vector<Extent> extents;  // none of them empty

  uint64_t nbytes() const;
};

// Sends one put; runs whose destinations follow each other arrive as one extent. The runs' sources
// must lie inside of the memory (first_bad_source). The socket must block, with SO_SNDTIMEO set.
// Throws SystemError: ETIMEDOUT when no byte moved for that long. Shutting the socket down from
// another thread ends it.
void send_put(int fd, uint64_t nonce, const std::byte* memory, const Run* runs, size_t count);

// Index of the first run that is empty or whose source is outside of `nbytes` bytes, or -1.
int64_t first_bad_source(const Run* runs, size_t count, uint64_t nbytes);

// The next put's header; nothing at the end of the stream. Waits as long as it takes. Throws
// SystemError when the connection ends inside, EPROTO when this is no header.
std::optional<PutHeader> receive_header(int fd);

// Receives a put's bytes and throws them away.
void discard_put(int fd, const PutHeader& put);

// The blocks that one reservation's bytes may be written into, until it is closed. Methods may be
// called from any thread.
class Landing {
 public:
  // Throws std::invalid_argument when a block lies outside of the memory.
  Landing(std::byte* memory, uint64_t nbytes, uint64_t block_bytes,
          const std::vector<int64_t>& blocks);
  Landing(const Landing&) = delete;
  Landing& operator=(const Landing&) = delete;

  // On return nothing is written any more: it waits for one recv at most.
  void close();

  // How many of the first blocks have arrived whole.
  uint64_t complete() const { return complete_.load(std::memory_order_acquire); }

  // Takes the put's bytes, which then cannot come again; or says why they may not come, after which
  // some of them may be taken.
  std::string claim(const PutHeader& put);

  // Receives a put that was claimed; what comes after `close` is thrown away. Waits as long as it
  // takes; throws SystemError when the connection ends first.
  void receive(int fd, const PutHeader& put);

 private:
  // Bytes of a block that came, or are about to: ranges that do not touch.
  class Claimed {
   public:
    // False, and nothing changes, when some of them are in it already.
    bool add(const Extent& extent);

   private:
    std::map<int64_t, int64_t> end_of_;  // by where it starts
  };
  struct Block {
    Claimed claimed;
    uint64_t here = 0;            // bytes that have arrived
  };
  // What of a put goes into one block.
  struct Part {
    size_t number;  // of the block in the reservation
    Extent within;
  };

  // An extent's parts; false when one is not in the reservation.
  bool split(const Extent& extent, std::vector<Part>& parts) const;
  // `bytes` more of the parts, of which `first` is the first that is not here, but for its beginning.
  void arrived(std::vector<Part>& parts, size_t& first, uint64_t bytes);

  std::byte* const memory_;
  const uint64_t block_bytes_;
  std::unordered_map<int64_t, size_t> number_of_;
  std::mutex writing_;  // held for each recv into the memory
  std::atomic<bool> open_{true};
  std::mutex counting_;  // guards what follows
  std::vector<Block> blocks_;
  std::atomic<uint64_t> complete_{0};
};

}  // namespace pdctl
