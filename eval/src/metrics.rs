//! Latency histograms and run results.
