//! Settings of sessions: what clients may set. The proxy takes what it knows, and what a source of the client's kind knows;
//! the rest is refused, as that kind does.

use orthodrome_geotp::sql::Dialect;

use super::driver::quoted;

/// What PostgreSQL's clients set when they begin, or around what they do.
const POSTGRES: &[&str] = &[
    "application_name",
    "bytea_output",
    "check_function_bodies",
    "client_encoding",
    "client_min_messages",
    "datestyle",
    "default_transaction_read_only",
    "extra_float_digits",
    "idle_in_transaction_session_timeout",
    "intervalstyle",
    "lock_timeout",
    "names",
    "row_security",
    "search_path",
    "standard_conforming_strings",
    "statement_timeout",
    "synchronous_commit",
    "timezone",
    "transaction_read_only",
];

/// What MySQL's and MariaDB's clients set. Some are one server's only.
const MARIA: &[&str] = &[
    "character_set_client",
    "character_set_connection",
    "character_set_results",
    "collation_connection",
    "foreign_key_checks",
    "innodb_lock_wait_timeout",
    "max_execution_time",
    "names",
    "net_read_timeout",
    "net_write_timeout",
    "session_track_gtids",
    "session_track_schema",
    "session_track_state_change",
    "session_track_system_variables",
    "session_track_transaction_info",
    "sql_auto_is_null",
    "sql_mode",
    "sql_notes",
    "sql_safe_updates",
    "sql_select_limit",
    "time_zone",
    "timezone",
    "transaction_read_only",
    "tx_read_only",
    "unique_checks",
    "wait_timeout",
];

/// Whether a setting is known without asking. Names with a dot are a client's own at PostgreSQL.
pub(super) fn is_known(client: Dialect, name: &str) -> bool {
    match client {
        Dialect::PostgreSql => name.contains('.') || POSTGRES.contains(&name),
        Dialect::MariaDb => MARIA.contains(&name),
    }
}

/// The question whether a source has a setting: rows say yes.
pub(super) fn asking_for(kind: Dialect, name: &str) -> String {
    let name = quoted(name);
    match kind {
        Dialect::PostgreSql => format!("SELECT 1 FROM pg_settings WHERE lower(name) = {name}"),
        Dialect::MariaDb => format!("SHOW SESSION VARIABLES WHERE variable_name = {name}"),
    }
}
