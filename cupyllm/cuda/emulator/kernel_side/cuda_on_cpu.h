// What a kernel file finds on the CPU in place of the CUDA headers.
//
// g++ includes this file before the kernel text (-include), so that the same .cu text that NVRTC compiles for a GPU
// compiles here. It turns the CUDA keywords into plain C++ and brings in the types, the intrinsics and the threads.
// A name that is not declared in this folder does not compile: the emulator never guesses.
//
// Not emulated: textures, cooperative grid sync, thread block clusters, dynamic parallelism, inline PTX.
#pragma once

// System headers come first: the keywords and macros below must not reach them.
#include <float.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <limits>
#include <source_location>
#include <type_traits>
#include <utility>

#define CUDA_ON_CPU 1

// Functions shared between a kernel's object file and the runtime's; they stay invisible outside the library.
#define EMU_INTERNAL extern "C" __attribute__((visibility("hidden")))
// Entry points that Python finds by name.
#define EMU_PUBLIC extern "C" __attribute__((visibility("default")))
#define EMU_INLINE static inline __attribute__((always_inline))

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __managed__
#define __forceinline__         inline __attribute__((always_inline))
#define __noinline__            __attribute__((noinline))
#define __launch_bounds__(...)  // enforced by the launcher, see EMU_EXPORT_KERNEL
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// Every OS thread loads its own copy of the library and runs one block at a time, so a static variable is private to
// a block. Its own section gives the range to poison, to watch for races and to count.
#define __shared__ static __attribute__((section("emu_shared")))

#include "types.h"
#include "half.h"
#include "arithmetic.h"
#include "threads.h"
#include "memory.h"
#include "tensor_core.h"
#include "export.h"
