//! Executes SET and SHOW for session settings.

use std::borrow::Cow;

use orthodrome_geotp::sql::set::{ConfigItem, assigned, config_columns, put_variables, set_config};
use orthodrome_geotp::sql::{Answer, Change, Dialect, Parsed, SourceId, Term, Value, Verb, parse};

use super::driver::Setting;
use super::maria::NO_ESCAPES;
use super::operators::{table, text_answer};
use super::session::{Engine, Reply, Session, SqlError};
use super::settings::{self, Settings, Worth};
use super::words::translated;

/// Maximum number of cached values of settings that sources have accepted, so that not every new
/// client causes a query.
const TAKEN_MAX: usize = 1_000;

/// MariaDB's error number for an unknown time zone.
const NO_ZONE: u16 = 1298;

impl Session {
    /// Executes a `SET`, completely or not at all.
    pub(crate) async fn set(&mut self, changes: &[Change]) -> Result<Reply, SqlError> {
        if let [Change::Setting { name, value, .. }] = changes
            && (name == "orthodrome" || name.starts_with("orthodrome."))
            && let [Term::Text(value)] = value.as_slice()
        {
            return self.admin(&["alter".into(), "set".into(), value.clone()]).await;
        }
        let mut settings = self.settings.clone();
        for change in changes {
            match change {
                Change::Setting { name, value, is_local } => {
                    let worth = self.worth(name, value).await?;
                    let is_default = worth.is_none();
                    settings.set(name, worth, *is_local)?;
                    self.check_setting(name, is_default, &settings).await?;
                }
                Change::Level { level, is_session: true } => settings.set_isolation(*level),
                Change::ReadOnly { is, is_session: true } => settings.set_read_only(*is),
                Change::Level { is_session: false, .. }
                | Change::ReadOnly { is_session: false, .. }
                | Change::Autocommit(_) => {}
            }
        }
        for change in changes {
            if let Change::Autocommit(is) = change {
                if *is && !self.autocommit {
                    self.commit().await?;
                }
                self.autocommit = *is;
            }
        }
        for change in changes {
            self.set_of_transaction(change)?;
        }
        self.change_settings(settings).await?;
        Ok(Reply::done("SET"))
    }

    /// Takes other settings. What is remembered was answered with those of before, so it is sent first.
    async fn change_settings(&mut self, settings: Settings) -> Result<(), SqlError> {
        let differs = |kind| settings.at(kind) != self.settings.at(kind);
        let is_same = ![Dialect::PostgreSql, Dialect::MariaDb].into_iter().any(differs)
            && settings.isolation() == self.settings.isolation();
        if !is_same && !self.deferred.is_empty() {
            self.send_remembered().await?;
        }
        self.settings = settings;
        Ok(())
    }

    /// Executes a change of the current or next transaction, if it is one.
    pub(crate) fn set_of_transaction(&mut self, change: &Change) -> Result<(), SqlError> {
        let is_open = self.open.is_some() || !self.deferred.is_empty();
        let late = |what: &str| {
            Err(SqlError::new(
                "25001",
                format!("{what} must be set before any query of the transaction"),
            ))
        };
        match change {
            Change::Level { is_session: false, .. }
            | Change::ReadOnly { is_session: false, .. }
                if self.client == Dialect::MariaDb && self.in_transaction() =>
            {
                return Err(SqlError::new(
                    "25001",
                    "Transaction characteristics can't be changed while a transaction is in progress",
                ));
            }
            Change::Level { level, is_session: false } => {
                let level =
                    level.unwrap_or(self.settings.isolation().unwrap_or(self.proxy.isolation));
                if is_open && level != self.open_isolation() {
                    return late("the isolation level");
                }
                self.next_isolation = Some(level);
            }
            Change::ReadOnly { is, is_session: false } => {
                if is_open && !is && self.is_read_only() {
                    return late("transaction read-write mode");
                }
                self.read_only = Some(*is);
            }
            Change::Level { .. }
            | Change::ReadOnly { .. }
            | Change::Autocommit(_)
            | Change::Setting { .. } => {}
        }
        Ok(())
    }

    /// Executes `RESET` of one setting, or of all.
    pub(crate) async fn reset_setting(&mut self, name: Option<&str>) -> Result<Reply, SqlError> {
        let mut settings = self.settings.clone();
        match name {
            None => settings.reset(),
            Some("default_transaction_isolation" | "transaction_isolation") => {
                settings.set_isolation(None);
            }
            Some("default_transaction_read_only" | "transaction_read_only") => {
                settings.set_read_only(false);
            }
            Some(name) => {
                settings.set(name, None, false)?;
                self.check_setting(name, true, &settings).await?;
            }
        }
        self.change_settings(settings).await?;
        Ok(Reply::done("RESET"))
    }

    /// Sets the settings that a client sends at login, which a reset restores.
    pub(crate) async fn begin_with(
        &mut self,
        given: Vec<(String, String)>,
    ) -> Result<(), SqlError> {
        for (name, value) in given {
            self.set(&[assigned(&name, &value, false)?]).await?;
        }
        self.settings.begin_with_these();
        Ok(())
    }

    async fn worth(&self, name: &str, terms: &[Term]) -> Result<Option<Worth>, SqlError> {
        if terms == [Term::Default] {
            return Ok(None);
        }
        let mut words = Vec::new();
        let mut is_number = true;
        for term in terms {
            let word = self.value_of(name, term).await?;
            is_number &= !matches!(term, Term::Text(_)) && word.parse::<f64>().is_ok();
            words.push(word);
        }
        Ok(Some(Worth { words, is_number }))
    }

    async fn value_of(&self, name: &str, term: &Term) -> Result<String, SqlError> {
        let mut value = String::new();
        let mut left = vec![term];
        while let Some(term) = left.pop() {
            match term {
                Term::Default => {
                    let why = format!("DEFAULT is no part of a value of {name}");
                    return Err(SqlError::new("42601", why));
                }
                Term::Text(text) | Term::Number(text) => value.push_str(text),
                Term::Concat(terms) => left.extend(terms.iter().rev()),
                Term::Variable { name, is_global } => {
                    value.push_str(&self.value_of_variable(name, *is_global).await?);
                }
            }
        }
        Ok(value)
    }

    async fn value_of_variable(&self, name: &str, is_global: bool) -> Result<String, SqlError> {
        let own = if is_global {
            settings::initial(self.client, name).map(str::to_owned)
        } else {
            self.variable(name)
        };
        if let Some(own) = own {
            return Ok(own);
        }
        let scope = if is_global { "global" } else { "session" };
        let home = self.home_of(Dialect::MariaDb).ok_or_else(|| unknown(self.client, name))?;
        let answer = self.ask(home, &format!("SELECT @@{scope}.{name}"), false).await?;
        let cell = answer.rows.into_iter().flatten().next().flatten();
        Ok(String::from_utf8_lossy(&cell.unwrap_or_default()).into_owned())
    }

    /// Checks that sources know a setting and accept its value.
    async fn check_setting(
        &self,
        name: &str,
        is_default: bool,
        settings: &Settings,
    ) -> Result<(), SqlError> {
        if !settings::asks_sources(self.client, name) {
            return Ok(());
        }
        if settings::is_sources_own(self.client, name) {
            let is_own = self.client == Dialect::PostgreSql && name.contains('.');
            let Some(home) = self.home_of(self.client).filter(|_| !is_own || !is_default) else {
                // Drivers set some settings that have no effect without a source of their kind.
                let is_known = is_own || settings::initial(self.client, name).is_some();
                return if is_known { Ok(()) } else { Err(unknown(self.client, name)) };
            };
            if is_default {
                let found = self.ask(home, &settings::asking_for(self.client, name), false).await?;
                return if found.rows.is_empty() {
                    Err(unknown(self.client, name))
                } else {
                    Ok(())
                };
            }
        }
        let mut kinds = [Dialect::PostgreSql, Dialect::MariaDb];
        // A source of the client's kind returns errors in its form.
        kinds.sort_by_key(|kind| *kind != self.client);
        for kind in kinds {
            let all = settings.at(kind);
            if let (Engine::ByKey(_), false) = (&self.proxy.engine, all.is_empty()) {
                return Err(SqlError::new(
                    "0A000",
                    format!(
                        "{name}: the mode of this proxy sends its sources no settings of clients; choose another `mode`"
                    ),
                ));
            }
            let Some(home) = self.home_of(kind) else { continue };
            let name_there = settings::name_at(self.client, kind, name);
            for setting in all.iter().filter(|setting| setting.name == name_there) {
                self.try_setting(home, kind, setting).await?;
            }
        }
        Ok(())
    }

    /// Tries a setting at a source, unless a source of its kind has accepted it before.
    async fn try_setting(
        &self,
        home: SourceId,
        kind: Dialect,
        setting: &Setting,
    ) -> Result<(), SqlError> {
        let key = format!("{kind} {} {}", setting.name, setting.value);
        if self.proxy.taken().contains(&key) {
            return Ok(());
        }
        let Some(source) = self.proxy.direct.get(&home) else { return Ok(()) };
        match source.ask_with("SELECT 1", std::slice::from_ref(setting), false).await {
            // The source is unreachable. Statements that need it will fail with their own error.
            Err(_) => Ok(()),
            Ok(outcome) => match outcome.fault {
                Some(fault) if fault.number == 1193 || fault.sqlstate == "42704" => {
                    Err(unknown(self.client, &setting.name))
                }
                Some(mut fault) => {
                    if fault.number == NO_ZONE {
                        fault.message.push_str(
                            "; load the names of time zones there with mariadb-tzinfo-to-sql, or set an offset",
                        );
                    }
                    let name = self.proxy.catalogue.source(home).map(|s| s.name.as_str());
                    Err(translated(fault, self.client, name.unwrap_or_default()))
                }
                None => {
                    let mut taken = self.proxy.taken();
                    if taken.len() >= TAKEN_MAX {
                        taken.clear();
                    }
                    taken.insert(key);
                    Ok(())
                }
            },
        }
    }

    pub(crate) async fn show(&mut self, name: &str, parsed: &Parsed) -> Result<Reply, SqlError> {
        match self.shown(name) {
            Some(value) => Ok(Reply::Rows(text_answer(name, [value]), "SHOW")),
            None if self.home_of(Dialect::PostgreSql).is_some() => {
                self.elsewhere(parsed, &[]).await.map(|answer| Reply::Rows(answer, "SHOW"))
            }
            None => match settings::initial(self.client, name) {
                Some(value) => Ok(Reply::Rows(text_answer(name, [value.to_owned()]), "SHOW")),
                None => Err(unknown(self.client, name)),
            },
        }
    }

    /// A PostgreSQL setting that the proxy itself handles.
    fn shown(&self, name: &str) -> Option<String> {
        let switch = |is| if is { "on" } else { "off" }.to_owned();
        match name {
            "transaction_isolation" => return Some(self.open_isolation().name().to_lowercase()),
            "default_transaction_isolation" => {
                let level = self.settings.isolation().unwrap_or(self.proxy.isolation);
                return Some(level.name().to_lowercase());
            }
            "transaction_read_only" => return Some(switch(self.is_read_only())),
            "default_transaction_read_only" => return Some(switch(self.settings.is_read_only())),
            _ => {}
        }
        if settings::asks_sources(self.client, name) && self.home_of(Dialect::PostgreSql).is_some()
        {
            return None;
        }
        let set = self.settings.get(name).map(Worth::shown);
        set.or_else(|| {
            let is_own = !settings::asks_sources(self.client, name);
            settings::initial(self.client, name).filter(|_| is_own).map(str::to_owned)
        })
    }

    /// Settings that are reported to PostgreSQL clients whenever they change.
    pub(crate) fn reported(&self) -> Vec<(&'static str, String)> {
        let of = |name: &str| {
            let set = self.settings.get(name).map(Worth::shown);
            set.or_else(|| settings::initial(self.client, name).map(str::to_owned))
                .unwrap_or_default()
        };
        let switch = |is| if is { "on" } else { "off" }.to_owned();
        vec![
            ("application_name", of("application_name")),
            ("client_encoding", of("client_encoding")),
            ("DateStyle", of("datestyle")),
            ("IntervalStyle", of("intervalstyle")),
            ("TimeZone", of("timezone")),
            ("default_transaction_read_only", switch(self.settings.is_read_only())),
        ]
    }

    /// A MySQL session variable that the proxy itself handles.
    pub(crate) fn variable(&self, name: &str) -> Option<String> {
        let number = |is: bool| u8::from(is).to_string();
        if let Some(name) = name.strip_prefix("global.") {
            return settings::initial(self.client, name).map(str::to_owned);
        }
        match name {
            "tx_isolation" | "transaction_isolation" => {
                return Some(self.isolation().name().replace(' ', "-"));
            }
            "tx_read_only" | "transaction_read_only" => {
                return Some(number(self.settings.is_read_only()));
            }
            "autocommit" => return Some(number(self.autocommit)),
            "last_insert_id" | "identity" => return Some(self.last_insert_id.to_string()),
            // The proxy forwards no warnings.
            "warning_count" | "error_count" => return Some("0".into()),
            _ => {}
        }
        if settings::is_sources_own(self.client, name)
            && settings::initial(self.client, name).is_none()
        {
            return None;
        }
        let set = self.settings.get(name).map(Worth::shown);
        set.or_else(|| settings::initial(self.client, name).map(str::to_owned))
    }

    /// Corrects a source's answer to `SHOW VARIABLES` or `SHOW ALL`: it contains the client's own
    /// values.
    pub(crate) fn correct(&self, parsed: &Parsed, answer: &mut Answer) {
        let lower = parsed.text.to_lowercase();
        if self.client == Dialect::MariaDb && lower.contains("_variables") {
            // System tables show its modes too.
            let hidden = |cell: &[u8]| {
                let text = std::str::from_utf8(cell).ok()?;
                text.contains(NO_ESCAPES).then(|| {
                    let modes = text.split(',').filter(|mode| *mode != NO_ESCAPES);
                    modes.collect::<Vec<_>>().join(",").into_bytes()
                })
            };
            for cell in answer.rows.iter_mut().flatten().flatten() {
                if let Some(told) = hidden(cell) {
                    *cell = told;
                }
            }
        }
        if let Verb::Show(name) = &parsed.verb
            && name == "all"
        {
            for row in &mut answer.rows {
                let [Some(name), value, ..] = row.as_mut_slice() else { continue };
                if let Some(own) = self.shown(&String::from_utf8_lossy(name).to_lowercase()) {
                    *value = Some(own.into_bytes());
                }
            }
        }
        let mut words = parsed.text.split_whitespace().map(str::to_lowercase);
        let is_it = words.next().as_deref() == Some("show")
            && words.by_ref().take(2).any(|word| word == "variables");
        if self.client != Dialect::MariaDb || !is_it {
            return;
        }
        for row in &mut answer.rows {
            let [Some(name), value, ..] = row.as_mut_slice() else { continue };
            let name = String::from_utf8_lossy(name).to_lowercase();
            let own = self.variable(&name);
            let own = match (name.as_str(), own.as_deref()) {
                ("autocommit" | "tx_read_only" | "transaction_read_only", Some(own)) => {
                    Some(if own == "1" { "ON" } else { "OFF" }.to_owned())
                }
                _ => own,
            };
            if let Some(own) = own {
                *value = Some(own.into_bytes());
            }
        }
    }

    /// Statements for sources, in which the client's own variables are constants.
    pub(crate) fn with_variables_in<'a>(
        &self,
        batch: &'a [(Parsed, Vec<Value>)],
    ) -> Cow<'a, [(Parsed, Vec<Value>)]> {
        let has_some = |(parsed, _): &(Parsed, Vec<Value>)| {
            let lower = parsed.text.to_lowercase();
            lower.contains("@@") || lower.contains("last_insert_id")
        };
        if self.client != Dialect::MariaDb || !batch.iter().any(has_some) {
            return Cow::Borrowed(batch);
        }
        let all =
            batch.iter().map(|(parsed, values)| (self.with_variables(parsed), values.clone()));
        Cow::Owned(all.collect())
    }

    /// A statement in which the client's own variables are constants.
    pub(crate) fn with_variables(&self, parsed: &Parsed) -> Parsed {
        let mut parsed = parsed.clone();
        if let (Dialect::MariaDb, Verb::Data(statement)) = (self.client, &mut parsed.verb) {
            put_variables(statement, |name| self.variable(name));
        }
        parsed
    }
}

impl Session {
    /// The value of a PostgreSQL setting.
    async fn current(&mut self, name: &str) -> Result<String, SqlError> {
        let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.');
        let parsed = parse(&format!("SHOW {name}"), self.client)?.pop();
        let Some(parsed) = parsed.filter(|_| name.chars().all(is_plain)) else {
            return Err(unknown(self.client, name));
        };
        let Reply::Rows(answer, _) = self.show(&name.to_lowercase(), &parsed).await? else {
            return Err(unknown(self.client, name));
        };
        let cell = answer.rows.into_iter().flatten().flatten().next();
        Ok(cell.map_or_else(String::new, |cell| String::from_utf8_lossy(&cell).into_owned()))
    }

    /// Executes `SELECT set_config(…)`, which is a `SET` with an answer; none if it is another
    /// statement.
    pub(crate) async fn set_config(
        &mut self,
        parsed: &Parsed,
        values: &[Value],
    ) -> Result<Option<Answer>, SqlError> {
        let Verb::Data(statement) = &parsed.verb else { return Ok(None) };
        if self.client != Dialect::PostgreSql {
            return Ok(None);
        }
        let Some(found) = set_config(statement, values)? else {
            return Ok(None);
        };
        let names = config_columns(statement).unwrap_or_default();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let (mut changes, mut told) = (Vec::new(), Vec::new());
        for item in found.items {
            match item {
                ConfigItem::Set(change, value) => {
                    changes.push(change);
                    told.push(value);
                }
                ConfigItem::Current(name) => told.push(self.current(&name).await?),
            }
        }
        match self.set(&changes).await {
            Err(unknown) if found.if_known && unknown.sqlstate == "42704" => {
                Ok(Some(table(&names, [])))
            }
            done => done.map(|_| Some(table(&names, [told]))),
        }
    }
}

/// The error for an unknown setting.
fn unknown(client: Dialect, name: &str) -> SqlError {
    match client {
        Dialect::PostgreSql => {
            SqlError::new("42704", format!("unrecognized configuration parameter \"{name}\""))
        }
        Dialect::MariaDb => SqlError {
            sqlstate: "HY000".into(),
            number: 1193,
            message: format!("Unknown system variable '{name}'"),
            position: 0,
        },
    }
}
