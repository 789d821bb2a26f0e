// Run-time CPU dispatch for the plain loops of the core.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_SIMD_H_
#define TPU_EMBEDDING_OPS_CC_CORE_SIMD_H_

// A function marked TPU_EMBEDDING_CLONES is compiled once per CPU level and
// the loader picks the best one, so that a wheel needs no -march flag. The
// build sets -ffp-contract=off: the clones differ in speed, never in bits.
// Sanitizers intercept the resolver before they are initialised, so
// instrumented builds use the plain function. Loops over lanes (core/lanes.h)
// are compiled for the same levels, TPU_EMBEDDING_LEVELS.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TPU_EMBEDDING_LEVELS
#define TPU_EMBEDDING_CLONES \
  __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
// A helper called from a clone must be inlined into it, else it would run in
// its own baseline version.
#define TPU_EMBEDDING_INLINE inline __attribute__((always_inline))
#else
#define TPU_EMBEDDING_CLONES
#define TPU_EMBEDDING_INLINE inline
#endif

#endif  // TPU_EMBEDDING_OPS_CC_CORE_SIMD_H_
