//! Transactions across existing PostgreSQL and MariaDB servers, after GeoTP (Zhuang et al., "GeoTP:
//! Latency-aware Geo-Distributed Transaction Processing in Database Middlewares", extended version
//! 2025). Pure: no clock, no I/O, no threads.

pub mod agent;
pub mod contract;
pub mod deadlock;
pub mod hotspot;
pub mod middleware;
pub mod scalardb;
pub mod schedule;
pub mod simulated;
pub mod source;
pub mod sql;
