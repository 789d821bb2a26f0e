#include "core/row_options.h"

#include "core/update.h"

namespace tpu_embedding {

bool UpdatesAllRows(const RowOptions& options) { return options.all_rows; }

}  // namespace tpu_embedding
