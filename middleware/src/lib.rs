//! The middleware on real servers: `orthodrome proxy` and `orthodrome agent`.
//!
//! Reading order: [`config`] (configuration files), `session` (turns a client's statements into
//! rounds of a transaction), `rounds` (sends them, and waits for the answers), `near` (the mode of
//! that name), `elsewhere` (statements outside of transactions), `settings` and `set` (session
//! settings), `savepoints`, `discovery` (tables of the sources), `catalogue` and `shapes` (what
//! clients see of them), `keys` (generated keys), `operators` (statements for operators),
//! `preflight` (`proxy --check`), `host` (threads of the machines), `claim` (a number belongs to
//! one proxy), `source` and `driver` (sessions at a source), `marks` and `names` (savepoints at a
//! source, and locks for missing rows), `consensus` and `records` (the mode `scalardb`), `postgres`
//! and `maria` (protocols of the sources), `postgres_front` and `mysql_front` (protocols of the
//! clients), `link` (connections between processes), `messages` (encoding of records and
//! messages).

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "this crate touches clocks, threads and sockets: its machines are in orthodrome-geotp"
)]
#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "bytes of foreign protocols and statements of clients: whatever is not known is refused"
)]

mod auth;
mod binary;
mod catalogue;
mod claim;
pub mod config;
mod consensus;
mod copy;
mod cursors;
mod decisions;
mod discovery;
mod driver;
mod elsewhere;
mod errors;
mod front;
mod gather;
mod halt;
mod host;
mod keys;
mod link;
pub mod local;
mod maria;
mod marks;
mod messages;
mod mysql_front;
mod mysql_text;
mod mysql_wire;
mod names;
mod near;
mod operators;
mod parameters;
mod postgres;
mod postgres_front;
mod postgres_wire;
mod preflight;
mod records;
mod rounds;
mod run;
mod savepoints;
mod session;
mod session_list;
mod set;
mod settings;
mod shapes;
mod source;
mod stream;
mod told;
mod trust;
mod words;

pub use config::{AgentConfig, ConfigError, ProxyConfig};
pub use driver::{Endpoint, Fault, Sql, Statement};
pub use orthodrome_geotp::sql::Dialect;
pub use orthodrome_geotp::sql::parse::STACK_BYTES;
pub use preflight::{Inspected, inspect};
pub use run::{Addresses, RunError, run_agent, run_proxy};
