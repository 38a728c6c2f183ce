#pragma once  // its contents come from kernel_side/, which is included before every kernel
