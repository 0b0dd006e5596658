//! The `orthodrome` binary.
fn main() {}
