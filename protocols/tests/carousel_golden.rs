//! The golden traces of Carousel: one file, one behaviour (`src/carousel/testdata`). Rewritten by
//! `cargo xtask golden`.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use orthodrome_protocols::carousel::{CarouselBasic, CarouselFast};

#[test]
fn golden_traces_of_carousel() {
    orthodrome_sim::golden::run_all::<CarouselBasic>("src/carousel/testdata").unwrap();
}

#[test]
fn golden_traces_of_carousel_fast() {
    orthodrome_sim::golden::run_all::<CarouselFast>("src/carousel/testdata/fast").unwrap();
}
