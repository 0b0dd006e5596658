//! Settings of sessions: which of them clients may set, and their effects.
//!
//! A setting that changes the meaning of statements goes to the sources with the next statement.
//! The proxy implements some settings itself. Others have no visible effect. The rest is refused,
//! with an error of the client's own protocol.

use std::time::Duration;

use orthodrome_core::ordered::OrdMap;

use orthodrome_geotp::sql::{Dialect, Isolation};

use super::driver::{Setting, quoted};
use super::maria::{NO_ESCAPES, SQL_MODE};
use super::session::SqlError;

/// Maximum size of all settings of one session, in bytes. They are sent with each transaction.
const BYTES_MAX: usize = 64 << 10;

/// How the proxy handles a setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rule {
    /// The setting has no effect that a client of the proxy could see. Its value is remembered.
    Nothing,
    /// The proxy has one fixed behaviour: only these values, which ask for it, are accepted.
    Only(&'static [&'static str]),
    /// The setting is always refused.
    Never,
    /// The character set of the client.
    Encoding,
    /// The order of day and month in dates.
    DateStyle,
    /// The time zone.
    Zone,
    /// MySQL's modes.
    SqlMode,
    /// MySQL's collation of texts that belong to no column.
    Collation,
    /// The lock time-out.
    LockWait,
    /// A time limit that the proxy enforces.
    Time,
    /// Sources of the client's kind get the setting unchanged.
    Source,
}

const ON: Rule = Rule::Only(&["on", "true", "yes", "1"]);
const OFF: Rule = Rule::Only(&["off", "false", "no", "0"]);

/// Settings of PostgreSQL clients that are not [`Rule::Source`].
const POSTGRES: &[(&str, Rule)] = &[
    ("application_name", Rule::Nothing),
    ("bytea_output", Rule::Only(&["hex"])),
    ("check_function_bodies", Rule::Nothing),
    ("client_encoding", Rule::Encoding),
    ("client_min_messages", Rule::Nothing),
    ("datestyle", Rule::DateStyle),
    ("default_transaction_deferrable", Rule::Nothing),
    ("idle_in_transaction_session_timeout", Rule::Time),
    ("idle_session_timeout", Rule::Time),
    ("lock_timeout", Rule::LockWait),
    ("role", Rule::Never),
    ("session_authorization", Rule::Never),
    ("session_replication_role", Rule::Only(&["origin"])),
    ("standard_conforming_strings", ON),
    ("statement_timeout", Rule::Time),
    // Commits are always durable before they are acknowledged.
    (
        "synchronous_commit",
        Rule::Only(&["on", "local", "off", "true", "yes", "1", "false", "no", "0"]),
    ),
    ("tcp_keepalives_count", Rule::Nothing),
    ("tcp_keepalives_idle", Rule::Nothing),
    ("tcp_keepalives_interval", Rule::Nothing),
    ("tcp_user_timeout", Rule::Nothing),
    ("timezone", Rule::Zone),
    ("transaction_deferrable", Rule::Nothing),
];

/// Settings of MySQL clients that are not [`Rule::Source`].
const MARIA: &[(&str, Rule)] = &[
    ("character_set_client", Rule::Encoding),
    ("character_set_connection", Rule::Encoding),
    ("character_set_results", Rule::Encoding),
    ("collation_connection", Rule::Collation),
    ("completion_type", Rule::Only(&["0", "no_chain"])),
    ("default_storage_engine", Rule::Only(&["innodb"])),
    ("identity", Rule::Never),
    ("idle_transaction_timeout", Rule::Time),
    ("innodb_lock_wait_timeout", Rule::LockWait),
    ("insert_id", Rule::Never),
    ("interactive_timeout", Rule::Nothing),
    ("last_insert_id", Rule::Never),
    ("lock_wait_timeout", Rule::Nothing),
    ("max_execution_time", Rule::Time),
    ("max_statement_time", Rule::Time),
    ("names", Rule::Encoding),
    ("net_buffer_length", Rule::Nothing),
    ("net_read_timeout", Rule::Nothing),
    ("net_retry_count", Rule::Nothing),
    ("net_write_timeout", Rule::Nothing),
    ("profiling", OFF),
    ("pseudo_thread_id", Rule::Never),
    ("rand_seed1", Rule::Never),
    ("rand_seed2", Rule::Never),
    ("session_track_gtids", Rule::Nothing),
    ("session_track_schema", Rule::Nothing),
    ("session_track_state_change", Rule::Nothing),
    ("session_track_system_variables", Rule::Nothing),
    ("session_track_transaction_info", Rule::Nothing),
    ("sql_auto_is_null", OFF),
    ("sql_log_bin", ON),
    ("sql_mode", Rule::SqlMode),
    ("sql_notes", Rule::Nothing),
    ("sql_quote_show_create", Rule::Nothing),
    ("sql_safe_updates", OFF),
    ("sql_select_limit", Rule::Only(&["18446744073709551615", "4294967295"])),
    ("sql_warnings", Rule::Nothing),
    ("storage_engine", Rule::Only(&["innodb"])),
    ("time_zone", Rule::Zone),
    ("timestamp", Rule::Never),
    ("wait_timeout", Rule::Time),
];

/// Modes that change how a statement is parsed. The proxy parses statements before any source does.
const READING_MODES: &[&str] = &[
    "ansi",
    "ansi_quotes",
    "db2",
    "high_not_precedence",
    "ignore_space",
    "maxdb",
    "mssql",
    "no_backslash_escapes",
    "oracle",
    "pipes_as_concat",
    "postgresql",
];

/// The default collation of MySQL 8, and the nearest one that MariaDB and MySQL of every version
/// have.
const MYSQL_8: &str = "utf8mb4_0900_ai_ci";
const SIMILAR_TO_MYSQL_8: &str = "utf8mb4_unicode_520_ci";

fn rule(client: Dialect, name: &str) -> Rule {
    let rules = match client {
        Dialect::PostgreSql => POSTGRES,
        Dialect::MariaDb => MARIA,
    };
    let found = rules.iter().find(|(known, _)| *known == name);
    found.map_or(Rule::Source, |(_, rule)| *rule)
}

/// The value of a setting: a list, usually with one element.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Worth {
    pub(crate) words: Vec<String>,
    /// True if it was written in digits without quotes.
    pub(crate) is_number: bool,
}

impl Worth {
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self { words: vec![text.into()], is_number: false }
    }

    pub(crate) fn shown(&self) -> String {
        self.words.join(", ")
    }
}

type Values = OrdMap<String, Worth>;

/// The values that a session has set.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Kept {
    values: Values,
    isolation: Option<Isolation>,
    is_read_only: bool,
}

/// The settings of a session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Settings {
    client: Dialect,
    /// The values that the client sent at login.
    initial: Values,
    kept: Kept,
    /// The values before the transaction, if a rollback restores them (PostgreSQL).
    before: Option<Kept>,
    /// Values that last until the transaction ends.
    local: Values,
}

impl Settings {
    pub(crate) fn new(client: Dialect) -> Self {
        let (initial, local) = (Values::new(), Values::new());
        Self { client, initial, kept: Kept::default(), before: None, local }
    }

    /// Makes the current values the initial ones of the session.
    pub(crate) fn begin_with_these(&mut self) {
        self.initial.append(&mut self.kept.values);
    }

    /// Restores the state at the beginning of the session.
    pub(crate) fn discard(&mut self) {
        self.kept = Kept::default();
        self.local.clear();
        self.before = None;
    }

    /// Resets all settings to the initial values.
    pub(crate) fn reset(&mut self) {
        self.kept = Kept::default();
        self.local.clear();
    }

    pub(crate) fn isolation(&self) -> Option<Isolation> {
        self.kept.isolation
    }

    pub(crate) fn set_isolation(&mut self, level: Option<Isolation>) {
        self.kept.isolation = level;
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.kept.is_read_only
    }

    pub(crate) fn set_read_only(&mut self, is: bool) {
        self.kept.is_read_only = is;
    }

    /// Notes the begin of a transaction. At PostgreSQL a rollback restores the settings from before
    /// it.
    pub(crate) fn begin(&mut self) {
        if self.client == Dialect::PostgreSql && self.before.is_none() {
            self.before = Some(self.kept.clone());
        }
    }

    /// Restores the settings at a savepoint, to which the transaction rolls back.
    pub(crate) fn go_back(&mut self, then: &Self) {
        self.kept = then.kept.clone();
        self.local = then.local.clone();
    }

    /// Notes the end of the transaction.
    pub(crate) fn end(&mut self, is_committed: bool) {
        let before = self.before.take();
        if let (false, Some(before)) = (is_committed, before) {
            self.kept = before;
        }
        self.local.clear();
    }

    /// The value of a setting, if it was set.
    pub(crate) fn get(&self, name: &str) -> Option<&Worth> {
        let local = self.local.get(name).or_else(|| self.kept.values.get(name));
        local.or_else(|| self.initial.get(name))
    }

    /// Sets a value; none restores the initial one. The sources may still have to be asked about
    /// it.
    pub(crate) fn set(
        &mut self,
        name: &str,
        worth: Option<Worth>,
        is_local: bool,
    ) -> Result<(), SqlError> {
        let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '$');
        if name.is_empty() || !name.chars().all(is_name) {
            return Err(SqlError::new(
                "42602",
                format!("invalid configuration parameter name \"{name}\""),
            ));
        }
        let worth = worth.map(|worth| checked(self.client, name, worth)).transpose()?;
        if (self.client, name) == (Dialect::MariaDb, "names") {
            // `SET NAMES` without `COLLATE` restores the default collation of the character set.
            self.kept.values.remove("collation_connection");
        }
        let initial = self.initial.get(name).cloned();
        match (worth.or(initial), is_local) {
            (Some(worth), true) => drop(self.local.insert(name.to_owned(), worth)),
            (Some(worth), false) => {
                self.local.remove(name);
                self.kept.values.insert(name.to_owned(), worth);
            }
            (None, _) => {
                self.local.remove(name);
                self.kept.values.remove(name);
            }
        }
        let bytes = |values: &Values| -> usize {
            let of = |worth: &Worth| worth.words.iter().map(String::len).sum::<usize>();
            values.iter().map(|(name, worth)| name.len() + of(worth)).sum()
        };
        let all = [&self.initial, &self.kept.values, &self.local];
        if all.into_iter().map(bytes).sum::<usize>() > BYTES_MAX {
            let why = format!(
                "the settings of a session may have {BYTES_MAX} bytes together; reset some"
            );
            return Err(SqlError::new("54000", why));
        }
        Ok(())
    }

    /// The settings for sources of a kind.
    pub(crate) fn at(&self, kind: Dialect) -> Vec<Setting> {
        let mut all: OrdMap<&String, &Worth> = self.initial.iter().collect();
        all.extend(&self.kept.values);
        all.extend(&self.local);
        all.into_iter().filter_map(|(name, worth)| at(self.client, kind, name, worth)).collect()
    }

    /// The time limit of a statement.
    pub(crate) fn statement_time(&self, is_read: bool) -> Option<Duration> {
        let names: &[&str] = match self.client {
            Dialect::PostgreSql => &["statement_timeout"],
            Dialect::MariaDb if is_read => &["max_statement_time", "max_execution_time"],
            Dialect::MariaDb => &["max_statement_time"],
        };
        names.iter().filter_map(|name| self.time(name)).min()
    }

    /// The time limit for a silent client, and whether it applies within a transaction only.
    pub(crate) fn idle_time(&self, is_in_transaction: bool) -> Option<(Duration, bool)> {
        let name = match (self.client, is_in_transaction) {
            (Dialect::PostgreSql, true) => "idle_in_transaction_session_timeout",
            (Dialect::PostgreSql, false) => "idle_session_timeout",
            (Dialect::MariaDb, true) if self.time("idle_transaction_timeout").is_some() => {
                "idle_transaction_timeout"
            }
            (Dialect::MariaDb, _) => "wait_timeout",
        };
        self.time(name).map(|time| (time, is_in_transaction))
    }

    /// A time limit; 0 means none.
    fn time(&self, name: &str) -> Option<Duration> {
        let worth = self.get(name)?;
        duration(self.client, name, worth).filter(|time| !time.is_zero())
    }
}

/// Whether sources must be asked whether they know this setting and its value.
pub(crate) fn asks_sources(client: Dialect, name: &str) -> bool {
    match rule(client, name) {
        Rule::Zone | Rule::SqlMode | Rule::Collation | Rule::Source => true,
        Rule::Nothing
        | Rule::Only(_)
        | Rule::Never
        | Rule::Encoding
        | Rule::DateStyle
        | Rule::LockWait
        | Rule::Time => false,
    }
}

/// Whether only sources of the client's kind have such a setting.
pub(crate) fn is_sources_own(client: Dialect, name: &str) -> bool {
    rule(client, name) == Rule::Source
}

/// The query whether a source has a setting; if so, the answer has rows.
pub(crate) fn asking_for(kind: Dialect, name: &str) -> String {
    let name = quoted(name);
    match kind {
        Dialect::PostgreSql => format!("SELECT 1 FROM pg_settings WHERE lower(name) = {name}"),
        Dialect::MariaDb => format!("SHOW SESSION VARIABLES WHERE variable_name = {name}"),
    }
}

/// The name of a setting at sources of a kind.
pub(crate) fn name_at(client: Dialect, kind: Dialect, name: &str) -> &str {
    match (rule(client, name), kind) {
        (Rule::Zone, Dialect::PostgreSql) => "timezone",
        (Rule::Zone, Dialect::MariaDb) => "time_zone",
        (Rule::LockWait, Dialect::PostgreSql) => "lock_timeout",
        (Rule::LockWait, Dialect::MariaDb) => "innodb_lock_wait_timeout",
        _ => name,
    }
}

/// The settings that one setting becomes at sources of a kind.
fn at(client: Dialect, kind: Dialect, name: &str, worth: &Worth) -> Option<Setting> {
    let of = |name: &str, value: String| Some(Setting { name: name.to_owned(), value });
    if client == Dialect::PostgreSql && is_as_at_sources(name, worth) {
        return None;
    }
    match rule(client, name) {
        Rule::Nothing | Rule::Only(_) | Rule::Never | Rule::Encoding | Rule::Time => None,
        Rule::DateStyle if kind == Dialect::PostgreSql => of(name, written(kind, worth)),
        Rule::Collation if kind == Dialect::MariaDb => {
            // Drivers that take the proxy for MySQL 8 ask for its default collation.
            let is_newest = worth.shown().eq_ignore_ascii_case(MYSQL_8);
            let worth = if is_newest { &Worth::text(SIMILAR_TO_MYSQL_8) } else { worth };
            of(name, written(kind, worth))
        }
        Rule::DateStyle | Rule::Collation => None,
        Rule::Source if kind != client => None,
        Rule::Source if name == "search_path" => of(name, written(kind, &with_public(worth))),
        Rule::Source => of(name, written(kind, worth)),
        Rule::SqlMode if kind == Dialect::MariaDb => {
            let modes = worth.shown();
            let modes =
                if modes.is_empty() { NO_ESCAPES.into() } else { format!("{modes},{NO_ESCAPES}") };
            of(name, quoted(&modes))
        }
        Rule::SqlMode => None,
        Rule::Zone => {
            let value = match (Zone::read(client, worth), kind) {
                (Zone::Utc, _) => return None,
                (Zone::Offset(minutes), Dialect::MariaDb) => signed(minutes),
                (Zone::Offset(minutes), Dialect::PostgreSql) => posix(minutes),
                (Zone::Named(name), _) => name,
            };
            match kind {
                Dialect::PostgreSql => of("timezone", quoted(&value)),
                Dialect::MariaDb => of("time_zone", quoted(&value)),
            }
        }
        Rule::LockWait => {
            // 0 means no bound at PostgreSQL. Then the proxy's bound applies.
            let wait = duration(client, name, worth).filter(|wait| !wait.is_zero())?;
            match kind {
                Dialect::PostgreSql => of("lock_timeout", wait.as_millis().max(1).to_string()),
                Dialect::MariaDb => {
                    of("innodb_lock_wait_timeout", wait.as_secs_f64().ceil().max(1.0).to_string())
                }
            }
        }
    }
}

/// Whether sessions at PostgreSQL sources have this value anyway. Drivers set these at each
/// connection.
fn is_as_at_sources(name: &str, worth: &Worth) -> bool {
    match name {
        "datestyle" => worth.words == ["ISO", "MDY"],
        // All of these mean the shortest exact form.
        "extra_float_digits" => matches!(worth.shown().as_str(), "1" | "2" | "3"),
        _ => false,
    }
}

/// A search path with the schema of the proxy's tables at its end. Clients empty their path and name
/// the schema with each table, and the proxy sends some of these names without it.
fn with_public(path: &Worth) -> Worth {
    let mut words = path.words.clone();
    if !words.iter().any(|word| word == "public") {
        words.push("public".to_owned());
    }
    Worth { words, is_number: false }
}

/// A value in the syntax of a kind of server.
fn written(kind: Dialect, worth: &Worth) -> String {
    if worth.is_number && kind == Dialect::MariaDb {
        return worth.shown();
    }
    worth.words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(", ")
}

/// A time zone.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Zone {
    Utc,
    /// Minutes east of Greenwich.
    Offset(i32),
    Named(String),
}

impl Zone {
    fn read(client: Dialect, worth: &Worth) -> Self {
        let text = worth.shown();
        let lower = text.trim().to_lowercase();
        if matches!(
            lower.as_str(),
            "utc" | "gmt" | "etc/utc" | "etc/gmt" | "z" | "zulu" | "universal"
        ) {
            return Self::Utc;
        }
        // The proxy's sessions at sources are in UTC, regardless of their servers' time zones.
        if client == Dialect::MariaDb && lower == "system" {
            return Self::Utc;
        }
        let minutes = match client {
            // Hours east, possibly with a fraction; or POSIX's form after a name.
            Dialect::PostgreSql if lower.starts_with(['-', '+']) && lower.contains(':') => {
                // POSIX's form without a name, which has the opposite sign.
                offset(&lower).map(|minutes| -minutes)
            }
            Dialect::PostgreSql => {
                let hours = lower.parse::<f64>().ok().filter(|hours| hours.abs() < 168.0);
                let minutes = hours.map(|hours| (hours * 60.0).round() as i32);
                minutes.or_else(|| offset(lower.strip_prefix('<')?.split_once('>')?.0))
            }
            Dialect::MariaDb => offset(&lower),
        };
        match minutes {
            Some(0) => Self::Utc,
            Some(minutes) => Self::Offset(minutes),
            None => Self::Named(text),
        }
    }
}

/// Minutes of `+02:00` or `-7`.
fn offset(text: &str) -> Option<i32> {
    let (sign, rest) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+')?),
    };
    let (hours, minutes) = rest.split_once(':').unwrap_or((rest, "0"));
    let (hours, minutes): (u8, u8) = (hours.parse().ok()?, minutes.parse().ok()?);
    Some(sign * (i32::from(hours) * 60 + i32::from(minutes)))
}

/// A zone in POSIX's form, which has the opposite sign.
fn posix(minutes: i32) -> String {
    format!("<{}>{}", signed(minutes), signed(-minutes))
}

fn signed(minutes: i32) -> String {
    let sign = if minutes < 0 { '-' } else { '+' };
    format!("{sign}{:02}:{:02}", minutes.abs() / 60, minutes.abs() % 60)
}

/// A time, by default in the unit of the setting.
fn duration(client: Dialect, name: &str, worth: &Worth) -> Option<Duration> {
    let text = worth.shown();
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_alphabetic()).trim();
    let number: f64 =
        digits.parse().ok().filter(|number: &f64| *number >= 0.0 && *number < 1e12)?;
    let unit = text.get(digits.len()..).unwrap_or_default().trim();
    let seconds = match (client, unit) {
        (Dialect::PostgreSql, "us") => 1e-6,
        (Dialect::PostgreSql, "" | "ms") => 1e-3,
        (Dialect::PostgreSql, "s") => 1.0,
        (Dialect::PostgreSql, "min") => 60.0,
        (Dialect::PostgreSql, "h") => 3_600.0,
        (Dialect::PostgreSql, "d") => 86_400.0,
        (Dialect::MariaDb, "") if name == "max_execution_time" => 1e-3,
        (Dialect::MariaDb, "") => 1.0,
        _ => return None,
    };
    Some(Duration::from_secs_f64(number * seconds))
}

/// Checks and normalizes a value.
fn checked(client: Dialect, name: &str, worth: Worth) -> Result<Worth, SqlError> {
    let text = worth.shown();
    let refused = |why: &str| Err(SqlError::new("0A000", format!("{name} = '{text}': {why}")));
    match rule(client, name) {
        Rule::Nothing | Rule::Source => Ok(worth),
        // In PostgreSQL's own form, for clients that compute with it.
        Rule::Zone if client == Dialect::PostgreSql => Ok(match Zone::read(client, &worth) {
            Zone::Offset(minutes) => Worth::text(posix(minutes)),
            Zone::Utc if worth.is_number => Worth::text("UTC"),
            Zone::Utc | Zone::Named(_) => worth,
        }),
        Rule::Zone => Ok(worth),
        Rule::Only(values) if values.contains(&text.to_lowercase().as_str()) => Ok(worth),
        Rule::Only(values) => refused(&format!(
            "clients of the proxy can have {} only",
            values.first().unwrap_or(&"")
        )),
        Rule::Never => {
            refused("this belongs to one session at one source; the proxy has none for a client")
        }
        Rule::Encoding => {
            let bare: String =
                text.to_lowercase().chars().filter(char::is_ascii_alphanumeric).collect();
            let (is_utf8, shown) = match client {
                // SQL_ASCII means no conversion, and everything here is UTF-8.
                Dialect::PostgreSql => (
                    matches!(bare.as_str(), "utf8" | "unicode" | "sqlascii"),
                    if bare == "sqlascii" { "SQL_ASCII" } else { "UTF8" },
                ),
                Dialect::MariaDb => (
                    matches!(
                        bare.as_str(),
                        "utf8" | "utf8mb3" | "utf8mb4" | "ascii" | "binary" | "null"
                    ),
                    text.as_str(),
                ),
            };
            if is_utf8 {
                Ok(Worth::text(shown))
            } else {
                refused("clients of the proxy speak UTF-8")
            }
        }
        Rule::DateStyle => {
            let mut order = "MDY";
            for word in text.split([',', ' ']).filter(|word| !word.is_empty()) {
                match word.to_lowercase().as_str() {
                    "iso" => {}
                    "mdy" | "us" | "noneuropean" | "noneuro" => order = "MDY",
                    "dmy" | "euro" | "european" => order = "DMY",
                    "ymd" => order = "YMD",
                    _ => return refused("clients of the proxy get dates in the style ISO"),
                }
            }
            Ok(Worth { words: vec!["ISO".into(), order.into()], is_number: false })
        }
        Rule::SqlMode => {
            let modes = text.split(',').map(str::trim).filter(|mode| !mode.is_empty());
            let modes: Vec<String> = modes.map(str::to_uppercase).collect();
            let reads = |mode: &&String| READING_MODES.contains(&mode.to_lowercase().as_str());
            if let Some(mode) = modes.iter().find(reads) {
                return refused(&format!(
                    "{mode} changes how statements are read, and the proxy reads them in one way only"
                ));
            }
            Ok(Worth::text(modes.join(",")))
        }
        Rule::Collation if text.to_lowercase().starts_with("utf8") => Ok(worth),
        Rule::Collation => refused("clients of the proxy speak UTF-8"),
        Rule::LockWait | Rule::Time => match duration(client, name, &worth) {
            Some(_) => Ok(worth),
            None => Err(SqlError::new(
                "22023",
                format!("invalid value for parameter \"{name}\": \"{text}\""),
            )),
        },
    }
}

/// The value in a new session, for settings that the proxy handles without a source.
pub(crate) fn initial(client: Dialect, name: &str) -> Option<&'static str> {
    let known: &[(&str, &str)] = match client {
        Dialect::PostgreSql => &[
            ("application_name", ""),
            ("bytea_output", "hex"),
            ("client_encoding", "UTF8"),
            ("datestyle", "ISO, MDY"),
            ("extra_float_digits", "1"),
            ("idle_in_transaction_session_timeout", "0"),
            ("idle_session_timeout", "0"),
            ("integer_datetimes", "on"),
            ("intervalstyle", "postgres"),
            ("search_path", "\"$user\", public"),
            ("server_encoding", "UTF8"),
            ("server_version", SERVER_VERSION),
            ("standard_conforming_strings", "on"),
            ("statement_timeout", "0"),
            ("timezone", "UTC"),
        ],
        Dialect::MariaDb => &[
            ("max_execution_time", "0"),
            ("max_statement_time", "0.000000"),
            ("sql_auto_is_null", "0"),
            ("sql_mode", SQL_MODE),
            ("sql_safe_updates", "0"),
            ("time_zone", "+00:00"),
            ("version_comment", "Orthodrome"),
        ],
    };
    known.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
}

/// The server version that PostgreSQL clients see.
pub(crate) const SERVER_VERSION: &str = "15.0 (Orthodrome)";

#[cfg(test)]
mod tests {
    use super::*;

    const PG: Dialect = Dialect::PostgreSql;
    const MARIA: Dialect = Dialect::MariaDb;

    fn with(client: Dialect, name: &str, value: &str) -> Result<Settings, SqlError> {
        let mut settings = Settings::new(client);
        let is_number = value.parse::<f64>().is_ok();
        let words = if ["search_path", "datestyle"].contains(&name) {
            value.split(", ").map(str::to_owned).collect()
        } else {
            vec![value.to_owned()]
        };
        settings.set(name, Some(Worth { words, is_number }), false).map(|()| settings)
    }

    /// The settings for sources of both kinds, abbreviated.
    fn told(client: Dialect, name: &str, value: &str) -> [String; 2] {
        let settings =
            with(client, name, value).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        [PG, MARIA].map(|kind| {
            let of = |Setting { name, value }| format!("{name} = {value}");
            settings.at(kind).into_iter().map(of).collect::<Vec<_>>().join("; ")
        })
    }

    #[test]
    fn what_changes_the_meaning_of_statements_goes_to_the_sources() {
        for (client, name, value, at_postgres, at_maria) in [
            (PG, "timezone", "UTC", "", ""),
            (
                PG,
                "timezone",
                "Europe/Berlin",
                "timezone = 'Europe/Berlin'",
                "time_zone = 'Europe/Berlin'",
            ),
            (PG, "timezone", "-7", "timezone = '<-07:00>+07:00'", "time_zone = '-07:00'"),
            (
                PG,
                "timezone",
                "<+05:30>-05:30",
                "timezone = '<+05:30>-05:30'",
                "time_zone = '+05:30'",
            ),
            (PG, "timezone", "-03:30", "timezone = '<+03:30>-03:30'", "time_zone = '+03:30'"),
            (PG, "search_path", "a, public", "search_path = 'a', 'public'", ""),
            (PG, "search_path", "", "search_path = '', 'public'", ""),
            (PG, "datestyle", "iso, mdy", "", ""),
            (PG, "extra_float_digits", "3", "", ""),
            (PG, "extra_float_digits", "0", "extra_float_digits = '0'", ""),
            (PG, "datestyle", "iso, dmy", "datestyle = 'ISO', 'DMY'", ""),
            (PG, "lock_timeout", "1500", "lock_timeout = 1500", "innodb_lock_wait_timeout = 2"),
            (PG, "lock_timeout", "0", "", ""),
            (PG, "myapp.user", "a'b", "myapp.user = 'a''b'", ""),
            (PG, "application_name", "psql", "", ""),
            (PG, "client_encoding", "utf-8", "", ""),
            (PG, "statement_timeout", "2min", "", ""),
            (MARIA, "time_zone", "+02:00", "timezone = '<+02:00>-02:00'", "time_zone = '+02:00'"),
            (MARIA, "time_zone", "SYSTEM", "", ""),
            (MARIA, "sql_mode", "", "", "sql_mode = 'NO_BACKSLASH_ESCAPES'"),
            (MARIA, "sql_mode", "traditional", "", "sql_mode = 'TRADITIONAL,NO_BACKSLASH_ESCAPES'"),
            (MARIA, "foreign_key_checks", "0", "", "foreign_key_checks = 0"),
            (
                MARIA,
                "innodb_lock_wait_timeout",
                "3",
                "lock_timeout = 3000",
                "innodb_lock_wait_timeout = 3",
            ),
            (MARIA, "names", "utf8mb4", "", ""),
            (MARIA, "wait_timeout", "28800", "", ""),
        ] {
            let told = told(client, name, value);
            assert_eq!(told, [at_postgres, at_maria], "{client}: {name} = {value}");
        }
    }

    #[test]
    fn what_the_proxy_cannot_do_is_refused() {
        for (client, name, value, why) in [
            (PG, "client_encoding", "LATIN1", "UTF-8"),
            (PG, "datestyle", "German", "ISO"),
            (PG, "bytea_output", "escape", "hex only"),
            (PG, "standard_conforming_strings", "off", "on only"),
            (PG, "role", "admin", "one source"),
            (PG, "statement_timeout", "soon", "invalid value"),
            (PG, "a b", "1", "parameter name"),
            (MARIA, "names", "latin1", "UTF-8"),
            (MARIA, "sql_mode", "STRICT_TRANS_TABLES, ansi_quotes", "ANSI_QUOTES"),
            (MARIA, "sql_select_limit", "10", "only"),
            (MARIA, "timestamp", "1", "one source"),
            (MARIA, "default_storage_engine", "MyISAM", "innodb only"),
        ] {
            let refused =
                with(client, name, value).err().unwrap_or_else(|| panic!("{name} = {value}"));
            assert!(refused.message.contains(why), "{name} = {value}: {}", refused.message);
        }
        let large = "x".repeat(BYTES_MAX);
        assert_eq!(with(PG, "a.b", &large).map_err(|error| error.sqlstate), Err("54000".into()));
    }

    #[test]
    fn a_rollback_takes_back_what_its_transaction_set_at_postgresql() {
        let shown = |settings: &Settings| settings.get("application_name").map(Worth::shown);
        let set = |settings: &mut Settings, value: &str, is_local| {
            settings.set("application_name", Some(Worth::text(value)), is_local).unwrap();
        };
        let mut settings = Settings::new(PG);
        set(&mut settings, "start", false);
        settings.begin_with_these();
        set(&mut settings, "a", false);
        for (is_committed, after) in [(false, "a"), (true, "b")] {
            settings.begin();
            set(&mut settings, "b", false);
            set(&mut settings, "c", true);
            settings.set_isolation(Some(Isolation::ReadCommitted));
            assert_eq!(shown(&settings).as_deref(), Some("c"));
            settings.end(is_committed);
            assert_eq!(shown(&settings).as_deref(), Some(after));
            assert_eq!(settings.isolation().is_some(), is_committed);
        }
        settings.set_read_only(true);
        settings.reset();
        assert_eq!(shown(&settings).as_deref(), Some("start"));
        assert!(!settings.is_read_only() && settings.isolation().is_none());
        let mut settings = Settings::new(MARIA);
        settings.begin();
        settings.set("sql_notes", Some(Worth::text("0")), false).unwrap();
        settings.end(false);
        assert!(settings.get("sql_notes").is_some());
    }

    #[test]
    fn times_have_their_units() {
        for (client, name, value, millis) in [
            (PG, "statement_timeout", "250", Some(250)),
            (PG, "statement_timeout", "1.5s", Some(1_500)),
            (PG, "statement_timeout", "0", None),
            (MARIA, "max_statement_time", "0.25", Some(250)),
            (MARIA, "max_execution_time", "250", Some(250)),
        ] {
            let settings = with(client, name, value).unwrap();
            assert_eq!(settings.statement_time(true), millis.map(Duration::from_millis), "{value}");
        }
        let settings = with(MARIA, "max_execution_time", "250").unwrap();
        assert_eq!(settings.statement_time(false), None);
    }
}
