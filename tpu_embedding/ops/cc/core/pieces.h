// Cuts work on several tables or features into one list of small pieces, so
// that one parallel loop balances all of them.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_PIECES_H_
#define TPU_EMBEDDING_OPS_CC_CORE_PIECES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/parallel.h"

namespace tpu_embedding {

struct Piece {
  int64_t owner;  // the table or feature
  int64_t begin;  // its units [begin, end)
  int64_t end;
};

// The work on one table or feature.
struct Work {
  int64_t units;   // samples or rows
  int64_t cycles;  // for all of them, roughly
};

// A piece takes about as long as a thread takes to wake up.
constexpr int64_t kCyclesPerPiece = 50000;

// Cuts each owner's units into pieces of about kCyclesPerPiece.
inline std::vector<Piece> CutPieces(const std::vector<Work>& works) {
  std::vector<Piece> pieces;
  pieces.reserve(works.size());
  for (size_t owner = 0; owner < works.size(); ++owner) {
    const auto [units, cycles] = works[owner];
    const int64_t count = std::clamp<int64_t>(cycles / kCyclesPerPiece, 1,
                                              std::max<int64_t>(units, 1));
    for (int64_t p = 0; p < count && units; ++p) {
      pieces.push_back({static_cast<int64_t>(owner), units * p / count,
                        units * (p + 1) / count});
    }
  }
  return pieces;
}

// Runs body(piece) for all pieces of the works. Pieces of one loop can take
// very different times, so whichever thread is free takes the next.
inline void ForEachPiece(const ParallelFor& parallel_for,
                         const std::vector<Work>& works,
                         const std::function<void(const Piece&)>& body) {
  const auto pieces = CutPieces(works);
  if (pieces.empty()) return;
  int64_t cycles = 0;
  for (const Work& work : works) cycles += work.cycles;
  const int64_t num_pieces = pieces.size();
  ForEachItem(parallel_for, num_pieces, cycles / num_pieces,
              [&](int64_t p) { body(pieces[p]); });
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_PIECES_H_
