//! What is asked of a protocol and how its answers are judged: workloads, histories, the
//! serializability checker, latency figures and reports.

pub mod checker;
pub mod diagram;
pub mod history;
pub mod metrics;
pub mod plot;
pub mod record;
pub mod workload;
