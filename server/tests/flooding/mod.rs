//! Many large transactions at once: how many, how large, and with which protocols. Shared by the tests of
//! nodes within one process and of real processes.

#![allow(dead_code, reason = "not every test needs all of it")]

use orthodrome_core::txn::VALUE_BYTES_MAX;
use orthodrome_protocols::registry;

/// Transactions at once.
pub const CALLERS: usize = 60;

/// Values of the largest size in each.
pub const VALUES: usize = 3;

/// The protocols to run: one of each family and of those whose variants go other ways, or those that `ORTHODROME_PROTOCOLS` names.
pub fn protocols() -> Vec<&'static str> {
    let wanted = std::env::var("ORTHODROME_PROTOCOLS").unwrap_or_default();
    let is_wanted = |name: &&str| wanted.is_empty() || wanted.split(',').any(|one| one == *name);
    registry::representatives().filter(is_wanted).collect()
}

/// The key of one value of a caller.
pub fn key(caller: usize, value: usize) -> String {
    format!("k{caller}-{value}")
}

/// The keys that a caller writes, with their values.
pub fn writes(caller: usize) -> impl Iterator<Item = (String, Vec<u8>)> {
    (0..VALUES).map(move |number| (key(caller, number), vec![b'x'; VALUE_BYTES_MAX]))
}
