//! The memory of simulations.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_long};

/// The number of the allocator's option `purge_delay`, in mimalloc 2.
const PURGE_DELAY: c_int = 15;

unsafe extern "C" {
    fn mi_option_set(option: c_int, value: c_long);
}

/// From now on the allocator keeps freed memory for this process. Otherwise it returns parts of huge
/// pages to the system. A simulation needs them again soon, and then waits for page faults, and for
/// the tables of small pages (`docs/performance.md`).
pub(crate) fn keep_freed() {
    // SAFETY: the function only stores the number, and has no conditions. A negative one means never.
    unsafe { mi_option_set(PURGE_DELAY, -1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        fn mi_option_get(option: c_int) -> c_long;
    }

    /// A later version of the allocator may number its options in another way.
    #[test]
    fn the_option_is_the_delay_before_memory_is_returned() {
        // SAFETY: the function only reads a number.
        let value = || unsafe { mi_option_get(PURGE_DELAY) };
        assert_eq!(value(), 10, "the default, in milliseconds");
        keep_freed();
        assert_eq!(value(), -1);
    }
}
