//! At low load, a transaction takes what a protocol's message flow implies on the map, and nothing
//! more: region by region, within three per cent.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may stop at the first surprise"
)]

mod carousel;
mod cold_start;
mod natto;
mod ocean_vista;
mod support;
mod tapir;
mod two_phase_locking;
