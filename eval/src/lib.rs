//! Workloads, histories, the serializability checker, latency figures and reports: what tests a
//! protocol, and what judges its answers.

pub mod checker;
pub mod diagram;
pub mod history;
pub mod listing;
pub mod metrics;
pub mod plot;
pub mod record;
pub mod workload;
