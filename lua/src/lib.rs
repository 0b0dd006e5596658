//! Lua 5.1 for scripts that every replica runs: the same text with the same arguments does the same
//! everywhere, and ends.
//!
//! - **Deterministic.** There is no clock, no randomness but a fixed series, and no address: values
//!   are numbers in the order in which they were made, `pairs` follows the order of insertion,
//!   and functions of numbers are computed in software. There is no collector to observe.
//! - **Bounded.** Everything counts as work: instructions, bytes that are copied or made, steps of
//!   searches and of patterns. A script that has used up its work stops, and cannot catch that.
//!   Nothing is freed before the script ends, so the same bound holds for memory.
//! - **Contained.** A script reaches nothing but its [`Host`]. The crate has no `unsafe`.
//!
//! [`Vm::new`] makes a script's world, [`Vm::load`] compiles a text, and [`Vm::call`] runs it.
//! Reading order: `value`, `heap`, `table`, `lexer`, `compiler`, `code`, `vm`, `library`.
//!
//! **Differences to Lua 5.1:** no coroutines, no environments of functions (`setfenv`), no modules,
//! no `load`, `print`, `io`, `os` and `debug`; the length of a list with gaps may be another of the
//! permitted ones.

#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "functions of Lua accept values of one type and treat all others alike"
)]

mod code;
mod compiler;
mod heap;
mod index;
mod lexer;
mod library;
mod number;
mod table;
#[cfg(test)]
mod tests;
mod value;
mod vm;

pub use heap::{Heap, Stop};
pub use number::whole;
pub use value::{StringId, TableId, Value};
pub use vm::{Args, Host, Results, Vm};

/// A number with 17 digits, which names it exactly.
#[must_use]
pub fn exact(number: f64) -> String {
    number::general(number, 17, false)
}

/// What is wrong with a text that is no script; none if it is one. The text may need `work`.
///
/// # Errors
/// More work than that.
pub fn check(text: &[u8], chunk: &str, work: u64) -> Result<Option<String>, Stop> {
    let mut heap = Heap::new(work);
    match compiler::compile(&mut heap, text, chunk) {
        Ok(_) => Ok(None),
        Err(lexer::Refusal::Syntax(what)) => Ok(Some(what)),
        Err(lexer::Refusal::Exhausted) => Err(Stop::Exhausted),
    }
}
