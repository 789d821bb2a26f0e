// The one list of all update rules. tests/cc/update_test.cc runs each of them.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ALL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ALL_H_

#include "core/optimizers/adadelta.h"
#include "core/optimizers/adagrad.h"
#include "core/optimizers/adagrad_momentum.h"
#include "core/optimizers/adam.h"
#include "core/optimizers/centered_rms_prop.h"
#include "core/optimizers/frequency_estimator.h"
#include "core/optimizers/ftrl.h"
#include "core/optimizers/keras_adam.h"
#include "core/optimizers/momentum.h"
#include "core/optimizers/proximal_adagrad.h"
#include "core/optimizers/proximal_yogi.h"
#include "core/optimizers/rms_prop.h"
#include "core/optimizers/rowwise_adagrad.h"
#include "core/optimizers/sgd.h"

namespace tpu_embedding {

template <class... Rules>
struct RuleList {};

using AllRules =
    RuleList<Sgd, Adagrad, RowwiseAdagrad, Adam, Ftrl, AdagradMomentum,
             Momentum, RmsProp, CenteredRmsProp, Adadelta, ProximalAdagrad,
             ProximalYogi, FrequencyEstimator, KerasAdagrad, KerasAdam>;

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ALL_H_
