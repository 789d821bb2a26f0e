// Work on several tables or features as one list of small pieces, so that one
// parallel loop balances all of them.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_PIECES_H_
#define TPU_EMBEDDING_OPS_CC_CORE_PIECES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tpu_embedding {

struct Piece {
  int64_t owner;  // the table or feature
  int64_t begin;  // its units [begin, end)
  int64_t end;
};

// Cuts each owner's [0, sizes[owner]) into pieces of at most `length` units.
inline std::vector<Piece> CutPieces(const std::vector<int64_t>& sizes,
                                    int64_t length) {
  std::vector<Piece> pieces;
  for (size_t owner = 0; owner < sizes.size(); ++owner) {
    for (int64_t begin = 0; begin < sizes[owner]; begin += length) {
      const int64_t end = std::min(begin + length, sizes[owner]);
      pieces.push_back({static_cast<int64_t>(owner), begin, end});
    }
  }
  return pieces;
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_PIECES_H_
