// The runtime that runs a kernel's blocks: one translation unit, compiled once per mode and linked into every kernel
// library. `-DEMU_CHECK=1` builds the checking one.
//
// Reading order: state.h (what a launch is made of), fibers.h (threads), barriers.h, warps.h, matrices.h and
// async_copy.h (tensor-core helpers), then memory_checks.h, races.h and traffic.h (check mode), faults.h, launch.h.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <vector>

#include "../kernel_side/cuda_on_cpu.h"
#include "state.h"
#include "faults.h"
#include "fibers.h"
#include "races.h"
#include "traffic.h"
#include "memory_checks.h"
#include "barriers.h"
#include "warps.h"
#include "matrices.h"
#include "async_copy.h"
#include "launch.h"
