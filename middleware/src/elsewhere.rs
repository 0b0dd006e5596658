//! Statements that are not part of a transaction: those that name no table of the catalogue,
//! changes of the schema, and queries for the columns of a statement's result.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use orthodrome_core::ordered::{OrdMap, OrdSet};

use orthodrome_geotp::sql::ast::{FromTable, ObjectType, Statement, TableObject};
use orthodrome_geotp::sql::catalog::{Placement, Table};
use orthodrome_geotp::sql::dialect::{bind, render, translate};
use orthodrome_geotp::sql::generated::{calls, put_calls};
use orthodrome_geotp::sql::merge::{Merge, merge};
use orthodrome_geotp::sql::plan::Keys;
use orthodrome_geotp::sql::route::{reads_system_tables, table_name};
use orthodrome_geotp::sql::set::{config_columns, effects, effects_of_words, set_config};
use orthodrome_geotp::sql::system::quote;
use orthodrome_geotp::sql::typed::{Kinds, tables_to_know, tables_to_order};
use orthodrome_geotp::sql::{
    Answer, BYTES_QUESTION, Column, Context, Dialect, Isolation, Kind, Parsed, Part, Plan,
    SourceId, Unread, Value, Verb, allow_values, created, defined_table, deletes, index_changes,
    name_columns, parse, plan, renamed, unread,
};

use super::driver::{Setting, Trouble};
use super::errors::{SqlError, interrupted, syntax, unreachable};
use super::operators::{table, text_answer};
use super::session::{Engine, Reply, Session};
use super::words::translated;

/// How long the proxy caches the columns of a table at a source.
const KINDS_KEPT: Duration = Duration::from_secs(10);

impl Session {
    /// A source of the client's kind if there is one, otherwise any source.
    fn home(&self) -> Option<(SourceId, Dialect)> {
        let kind = |id: &SourceId| self.proxy.catalogue.source(*id).map(|s| (*id, s.kind));
        let mut all = self.proxy.by_distance.iter().filter_map(kind);
        all.find(|(_, kind)| *kind == self.client)
            .or_else(|| self.proxy.by_distance.iter().find_map(kind))
    }

    /// The source that answers a statement without tables; for system catalogues it is the source
    /// of new tables.
    fn home_for(&self, text: &str) -> Option<(SourceId, Dialect)> {
        let lower = text.to_lowercase();
        let asks = ["pg_", "information_schema", "regclass", "show", "desc"]
            .iter()
            .any(|word| lower.contains(word));
        let kind = |at: SourceId| self.proxy.catalogue.source(at).map(|source| (at, source.kind));
        let own = self.default_source().and_then(kind).filter(|(_, kind)| *kind == self.client);
        let first = || self.catalogue_home().and_then(kind);
        own.or_else(first).filter(|_| asks).or_else(|| self.home())
    }

    /// The nearest source of a kind.
    pub(crate) fn home_of(&self, kind: Dialect) -> Option<SourceId> {
        let is_of =
            |id: &&SourceId| self.proxy.catalogue.source(**id).is_some_and(|s| s.kind == kind);
        self.proxy.by_distance.iter().find(is_of).copied()
    }

    /// Runs one query batch at a source outside of every transaction, with the client's settings.
    /// `may_leave`: it may change its session in a way that the proxy does not notice.
    pub(crate) async fn ask(
        &self,
        at: SourceId,
        text: &str,
        may_leave: bool,
    ) -> Result<Answer, SqlError> {
        let gone = || SqlError::new("08006", "no source is configured");
        let kind = self.proxy.catalogue.source(at).map(|s| s.kind).ok_or_else(gone)?;
        self.ask_as(at, text, &self.settings.at(kind), may_leave).await
    }

    /// The same with other settings.
    pub(crate) async fn ask_as(
        &self,
        at: SourceId,
        text: &str,
        settings: &[Setting],
        may_leave: bool,
    ) -> Result<Answer, SqlError> {
        let answers = self.all_answers(at, text, settings, may_leave).await?;
        Ok(answers.into_iter().next().unwrap_or_default())
    }

    /// The answers of all statements of a query batch, without the client's settings.
    pub(crate) async fn answers(&self, at: SourceId, text: &str) -> Result<Vec<Answer>, SqlError> {
        self.all_answers(at, text, &[], false).await
    }

    async fn all_answers(
        &self,
        at: SourceId,
        text: &str,
        settings: &[Setting],
        may_leave: bool,
    ) -> Result<Vec<Answer>, SqlError> {
        let gone = || SqlError::new("08006", "no source is configured");
        let source = self.proxy.direct.get(&at).ok_or_else(gone)?;
        let is_late = AtomicBool::new(false);
        let name = self.proxy.catalogue.source(at).map_or("", |source| source.name.as_str());
        let outcome = source.ask_until(text, settings, may_leave, self.stop(&is_late)).await;
        let outcome = outcome.map_err(|trouble| unreachable(trouble, name))?;
        match outcome.fault {
            // Only the proxy interrupts its sessions.
            Some(fault) if fault.is_interrupt() => {
                Err(interrupted(self.client, is_late.load(Ordering::Relaxed)))
            }
            Some(fault) => Err(translated(fault, self.client, name)),
            None => Ok(outcome.done.into_iter().map(|(answer, _)| answer).collect()),
        }
    }

    /// Ends when the client cancels its statement, or when the statement's time limit is over, which
    /// sets `is_late`.
    async fn stop(&self, is_late: &AtomicBool) {
        let time = self.settings.statement_time(true);
        tokio::select! {
            () = self.cancelled.notified() => {}
            () = tokio::time::sleep(time.unwrap_or_default()), if time.is_some() => {
                is_late.store(true, Ordering::Relaxed);
            }
        }
    }

    /// The columns of a query's result at a source, which does not run it. The query may have to
    /// wait for a lock on a table.
    pub(crate) async fn columns_at(
        &self,
        at: SourceId,
        text: &str,
    ) -> Result<Vec<Column>, SqlError> {
        let gone = || SqlError::new("08006", "no source is configured");
        let source = self.proxy.direct.get(&at).ok_or_else(gone)?;
        let named = self.proxy.catalogue.source(at).ok_or_else(gone)?;
        let settings = self.settings.at(named.kind);
        let is_late = AtomicBool::new(false);
        match source.described_until(text, &settings, self.stop(&is_late)).await {
            Ok(described) => Ok(described.columns),
            Err(Trouble::Fault(fault)) if fault.is_interrupt() => {
                Err(interrupted(self.client, is_late.load(Ordering::Relaxed)))
            }
            Err(Trouble::Fault(fault)) => Err(translated(fault, self.client, &named.name)),
            Err(broken) => Err(unreachable(broken, &named.name)),
        }
    }

    /// A plan with a source for a query that reads no table and calls a function that the proxy
    /// does not know: the function may change rows, so it runs once, and in the transaction. The
    /// source is that of new tables if it is of the client's kind, as for sequences and views;
    /// otherwise the nearest one of the client's kind. Other plans are returned as they are.
    pub(crate) fn with_source(
        &self,
        parsed: &Parsed,
        values: &[Value],
        plan: Plan,
    ) -> Result<Plan, SqlError> {
        let Verb::Data(statement) = &parsed.verb else { return Ok(plan) };
        if !plan.parts.is_empty()
            || !effects(statement).calls_unknown
            || reads_system_tables(statement)
            || set_config(statement, values)?.is_some()
        {
            return Ok(plan);
        }
        let kind = |at: SourceId| self.proxy.catalogue.source(at).map(|source| (at, source.kind));
        let own = self.default_source().and_then(kind).filter(|(_, kind)| *kind == self.client);
        let (source, kind) = own
            .or_else(|| self.home())
            .ok_or_else(|| SqlError::new("08006", "no source is configured"))?;
        let part = Part {
            source,
            prelude: Vec::new(),
            text: self.rendered(statement, values, kind)?,
            records: Vec::new(),
            keys: Keys::default(),
        };
        Ok(Plan { parts: vec![part], ..plan })
    }

    /// A statement for a source of this kind.
    fn rendered(
        &self,
        statement: &Statement,
        values: &[Value],
        kind: Dialect,
    ) -> Result<String, SqlError> {
        let mut statement = statement.clone();
        bind(&mut statement, values, kind)?;
        translate(&mut statement, self.client, kind, &self.proxy.catalogue)?;
        Ok(render(&statement, self.client, kind))
    }

    /// Runs a statement that concerns no table of the catalogue at a source, outside of every
    /// transaction.
    pub(crate) async fn elsewhere(
        &mut self,
        parsed: &Parsed,
        values: &[Value],
    ) -> Result<Answer, SqlError> {
        let parsed = &self.with_variables(parsed);
        let (Unread { text, words }, effects) = match &parsed.verb {
            Verb::Data(statement) => (Unread::default(), effects(statement)),
            _ => {
                let unread = unread(&parsed.text, self.client)?;
                let effects = effects_of_words(&unread.words);
                (unread, effects)
            }
        };
        self.check_effects(&effects)?;
        let (home, kind) = self
            .home_for(&parsed.text)
            .ok_or_else(|| SqlError::new("08006", "no source is configured"))?;
        let mut at = home;
        let text = match &parsed.verb {
            Verb::Data(statement) => self.rendered(statement, values, kind)?,
            _ => {
                let first = first_word(&words);
                let is_metadata = matches!(first, "show" | "desc" | "describe");
                if let ("show", Some(answer)) = (first, self.warnings(&words)?) {
                    return Ok(answer);
                }
                let is_asking = matches!(first, "select" | "with" | "table" | "explain");
                if !is_metadata && !is_asking {
                    return Err(self.not_supported(first, parsed));
                }
                if first == "explain" && words.iter().take(6).any(|word| word == "analyze") {
                    return Err(SqlError::new(
                        "0A000",
                        "EXPLAIN ANALYZE is not supported; use EXPLAIN, or send it to a source directly",
                    ));
                }
                let lower = text.to_lowercase();
                let names = lower.split(|c: char| !(c.is_alphanumeric() || c == '_'));
                let catalogue = self.catalogue();
                // A pattern of SHOW TABLES may be the name of a table.
                let is_list = words.iter().skip(1).take(2).any(|word| word == "tables");
                let names = names.filter(|_| !(is_metadata && is_list));
                let table = names.filter_map(|name| catalogue.table(name)).next();
                if let Some(table) = table {
                    if !is_metadata {
                        let problem = parsed.problem.as_deref();
                        let why = problem.map_or_else(String::new, |why| format!(" ({why})"));
                        return Err(SqlError::new(
                            "42601",
                            format!(
                                "syntax error: the proxy cannot parse this statement about \"{}\"{why}; use simpler SQL",
                                table.name
                            ),
                        ));
                    }
                    let kind_of = |id: &SourceId| self.proxy.catalogue.source(*id).map(|s| s.kind);
                    at = table
                        .sources()
                        .into_iter()
                        .find(|id| kind_of(id) == Some(self.client))
                        .unwrap_or(home);
                }
                if self.proxy.catalogue.source(at).map(|s| s.kind) != Some(self.client) {
                    return Err(SqlError::new(
                        "0A000",
                        format!(
                            "no {} source is configured, so the proxy cannot answer this",
                            self.client
                        ),
                    ));
                }
                text
            }
        };
        // The proxy does not know what a query that it cannot read calls, so the query is part of
        // an open transaction.
        let is_part = matches!(first_word(&words), "select" | "with" | "table")
            && (self.in_transaction() || !self.autocommit)
            && self.proxy.engine.xa().is_ok()
            && !self.asks_catalogue(&text)?;
        let mut answer = if is_part {
            self.ask_within(at, text.clone()).await?
        } else {
            self.ask_catalogue(at, &text, &words, effects.calls_unknown).await?
        };
        self.correct(parsed, &mut answer);
        let lower = text.to_lowercase();
        if lower.contains("from") || lower.starts_with("show") {
            answer.rows.retain(|row| !row.iter().flatten().any(|cell| is_own_table(cell)));
        }
        Ok(answer)
    }

    /// The error for an unsupported statement: either SQL has no such statement, or the proxy does
    /// not support it.
    fn not_supported(&self, first: &str, parsed: &Parsed) -> SqlError {
        match &parsed.problem {
            Some(problem) if !is_command(first) => syntax(self.client, &parsed.text, problem),
            _ => SqlError::new(
                "0A000",
                format!(
                    "the proxy does not support this statement; send it to a source directly: {}",
                    parsed.text.chars().take(100).collect::<String>()
                ),
            ),
        }
    }

    /// Whether a statement that the parser cannot read is a query.
    fn is_query(&self, parsed: &Parsed) -> Result<bool, SqlError> {
        let words = unread(&parsed.text, self.client)?.words;
        Ok(matches!(first_word(&words), "select" | "with" | "table"))
    }

    /// Answers `SHOW WARNINGS` and similar statements: the proxy forwards no warnings, and those at
    /// a source belong to another client.
    fn warnings(&self, words: &[String]) -> Result<Option<Answer>, SqlError> {
        if self.client != Dialect::MariaDb {
            return Ok(None);
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Ok(match words.as_slice() {
            ["show", "warnings" | "errors", ..] => Some(table(&["Level", "Code", "Message"], [])),
            ["show", "count", what @ ("warnings" | "errors"), ..] => {
                let name = format!("@@session.{}_count", what.trim_end_matches('s'));
                Some(text_answer(&name, ["0".to_owned()]))
            }
            ["show", "profile" | "profiles", ..] => {
                return Err(SqlError::new(
                    "0A000",
                    "profiles belong to one session at one source, and the proxy has none for a client",
                ));
            }
            _ => None,
        })
    }

    /// The columns at sources of the other kind than the client's on which the meaning of this
    /// statement's constants depends.
    pub(crate) async fn kinds_for(&self, parsed: &Parsed, values: &[Value]) -> Kinds {
        let Verb::Data(statement) = &parsed.verb else { return Kinds::new() };
        let catalogue = &*self.catalogue();
        let client = self.client;
        let is_other = |id: &SourceId| catalogue.source(*id).is_some_and(|s| s.kind != client);
        let is_postgres =
            |id: SourceId| catalogue.source(id).is_some_and(|s| s.kind == Dialect::PostgreSql);
        let mut kinds = Kinds::new();
        let known = tables_to_know(catalogue, client, statement, values);
        let ordered = tables_to_order(catalogue, statement);
        let names: OrdSet<&String> = known.iter().chain(&ordered).collect();
        for name in names {
            if self.has_schema && self.open.is_some() {
                // The transaction may have locked the table, or made it.
                continue;
            }
            let sources = catalogue.table(name).map(|table| table.sources()).unwrap_or_default();
            let all = sources.clone();
            let any = sources.first().copied().filter(|_| ordered.contains(name));
            let Some(at) = sources.into_iter().find(is_other).or(any) else { continue };
            let Some(mut columns) = self.columns_kept(at, name).await else { continue };
            // MariaDB says that a UUID is a text, and PostgreSQL has no collations of UUIDs.
            let postgres = all.iter().copied().find(|id| is_postgres(*id) && *id != at);
            if let Some(other) = postgres.filter(|_| ordered.contains(name))
                && let Some(others) = self.columns_kept(other, name).await
            {
                let is_uuid = |name: &String| {
                    others.iter().any(|(other, kind)| other == name && *kind == Kind::Uuid)
                };
                for (column, kind) in &mut columns {
                    if is_uuid(column) {
                        *kind = Kind::Uuid;
                    }
                }
            }
            kinds.insert(name.clone(), columns);
        }
        kinds
    }

    /// The columns of a table at a source, which are asked for now and then; none if they are not
    /// known.
    async fn columns_kept(&self, at: SourceId, name: &str) -> Option<Vec<(String, Kind)>> {
        let key = (at, name.to_owned());
        let kept = self.proxy.kinds().get(&key).cloned();
        if let Some((_, columns)) = kept.filter(|(since, _)| since.elapsed() < KINDS_KEPT) {
            return Some(columns);
        }
        let text =
            format!("SELECT * FROM {} LIMIT 0", quote(name, self.proxy.catalogue.source(at)?.kind));
        // If the table does not exist, the statement itself will get that error.
        let answer = self.ask(at, &text, false).await.ok()?;
        let columns = answer.columns.into_iter();
        let columns: Vec<_> =
            columns.map(|column| (column.name.to_lowercase(), column.kind)).collect();
        self.proxy.kinds().insert(key, (Instant::now(), columns.clone()));
        Some(columns)
    }

    /// The collations of PostgreSQL sources for the columns that a statement defines, if the sources
    /// of its table are of both kinds.
    pub(crate) async fn collations_for(&self, statement: &Statement) -> OrdMap<SourceId, String> {
        let mut found = OrdMap::new();
        let catalogue = &*self.catalogue();
        let table = defined_table(statement);
        let sources = table.and_then(|name| Some(catalogue.table(&name)?.sources()));
        let is_postgres =
            |id: &SourceId| catalogue.source(*id).is_some_and(|s| s.kind == Dialect::PostgreSql);
        let (postgres, others): (Vec<SourceId>, Vec<SourceId>) =
            sources.unwrap_or_default().into_iter().partition(is_postgres);
        for at in postgres.into_iter().filter(|_| !others.is_empty()) {
            // A source that does not answer does not get the statement either.
            let Ok(answer) = self.ask(at, BYTES_QUESTION, false).await else { continue };
            let cell = answer.rows.into_iter().next().and_then(|row| row.into_iter().next()?);
            found.extend(cell.and_then(|name| Some((at, String::from_utf8(name).ok()?))));
        }
        found
    }

    pub(crate) async fn schema(
        &mut self,
        parsed: &Parsed,
        values: &[Value],
    ) -> Result<Reply, SqlError> {
        if self.is_read_only() {
            return Err(self.cannot_write(&parsed.schema_tag()));
        }
        if let (true, Verb::Schema(statement)) = (self.in_block, &parsed.verb)
            && let Some(deletes) = deletes(statement)?
        {
            let deletes = parse(&deletes.join(";"), self.client)?;
            let batch: Vec<_> = deletes.into_iter().map(|parsed| (parsed, Vec::new())).collect();
            self.data(&batch, false, false).await?;
            return Ok(Reply::done("TRUNCATE TABLE"));
        }
        if self.client == Dialect::MariaDb {
            self.commit().await?;
        }
        if let (Engine::ByKey(_), Verb::Schema(statement)) = (&self.proxy.engine, &parsed.verb)
            && deletes(statement)?.is_some()
        {
            return Err(SqlError::new(
                "0A000",
                "TRUNCATE would empty records that have versions; delete rows by their keys, or choose another `mode`",
            ));
        }
        self.discover(&parsed.verb).await?;
        let Some(parsed) = self.without_absent(parsed) else {
            return Ok(Reply::done(&parsed.schema_tag()));
        };
        let parsed = &self.with_place(parsed);
        let renamed = self.renamed(parsed).await?;
        let plan = match self.plan_of_indexes(parsed).await? {
            Some(plan) => plan,
            None => self.planned(parsed, values).await?,
        };
        if plan.parts.is_empty() {
            return Ok(Reply::done(&parsed.schema_tag()));
        }
        let kind = |at: SourceId| self.proxy.catalogue.source(at).map(|source| source.kind);
        let is_postgres =
            plan.parts.iter().all(|part| kind(part.source) == Some(Dialect::PostgreSql));
        if self.in_block && !is_postgres {
            return Err(SqlError::new(
                "25001",
                "a MariaDB source cannot undo a schema change, so it cannot be part of a transaction; send it outside of one",
            ));
        }
        if self.in_block {
            self.proxy.engine.xa()?;
            self.change_schema(&plan).await?;
            if let Some((old, table)) = renamed {
                self.created.remove(&old);
                self.created.insert(table.name.clone(), table);
            }
            return Ok(Reply::done(&parsed.schema_tag()));
        }
        for part in &plan.parts {
            // Defaults and constraints may call any function.
            let changed = self.ask(part.source, &part.text, true).await;
            self.proxy.kinds().clear();
            self.proxy.discovered.forget();
            changed?;
        }
        self.created.clear();
        Ok(Reply::done(&parsed.schema_tag()))
    }

    /// The plan of a change of indexes that does not name their tables: it goes to every source that
    /// has the index. None for other statements.
    async fn plan_of_indexes(&mut self, parsed: &Parsed) -> Result<Option<Plan>, SqlError> {
        let Verb::Schema(statement) = &parsed.verb else { return Ok(None) };
        let Some(changes) = index_changes(statement).filter(|_| self.client == Dialect::PostgreSql)
        else {
            return Ok(None);
        };
        let all: Vec<(SourceId, Dialect)> =
            self.proxy.catalogue.sources().map(|(at, source)| (at, source.kind)).collect();
        let mut parts = Vec::new();
        for change in changes {
            let mut found = OrdMap::new();
            for (at, kind) in &all {
                let text = tables_with_index(*kind, &change.index);
                let is_within = self.has_schema && self.open.is_some();
                let answer = if is_within && *kind == Dialect::PostgreSql {
                    self.ask_within(*at, text).await?
                } else {
                    self.ask(*at, &text, false).await?
                };
                let names = answer.rows.into_iter().flatten().flatten();
                let names: OrdSet<String> =
                    names.map(|name| String::from_utf8_lossy(&name).into_owned()).collect();
                found.insert(*at, (*kind, names));
            }
            // At MariaDB several tables may have indexes of one name.
            let of_postgres = |(kind, _): &&(Dialect, OrdSet<String>)| *kind == Dialect::PostgreSql;
            let mut tables: OrdSet<String> =
                found.values().filter(of_postgres).flat_map(|(_, names)| names.clone()).collect();
            if tables.is_empty() {
                tables = found.values().flat_map(|(_, names)| names.clone()).collect();
            }
            let index = &change.index;
            let table = match tables.len() {
                0 if change.if_exists => continue,
                0 => {
                    let why = format!("index \"{index}\" does not exist");
                    return Err(SqlError::new("42704", why));
                }
                1 => tables.pop_first().unwrap_or_default(),
                _ => {
                    let tables = tables.into_iter().collect::<Vec<_>>().join(", ");
                    return Err(SqlError::new(
                        "0A000",
                        format!(
                            "several tables have an index \"{index}\" ({tables}); send the statement to the source of \
                             the table directly"
                        ),
                    ));
                }
            };
            for (source, (kind, names)) in found {
                if !names.contains(&table) {
                    continue;
                }
                let text = match kind {
                    Dialect::PostgreSql => change.text.clone(),
                    Dialect::MariaDb => change.for_mariadb(&table),
                };
                let (prelude, records, keys) = (Vec::new(), Vec::new(), Keys::default());
                parts.push(Part { source, prelude, text, records, keys });
            }
        }
        Ok(Some(Plan { parts, merge: Merge::Same, is_write: true, has_rows: false }))
    }

    /// Gives a new table a placement if it has none, and makes it known to this transaction.
    fn with_place(&mut self, parsed: Parsed) -> Parsed {
        let mut parsed = parsed;
        let Verb::Schema(statement) = &mut parsed.verb else { return parsed };
        let Some((name, columns, generated)) = created(statement) else { return parsed };
        let known = self.catalogue().table(&name).cloned();
        let table = match known {
            Some(table) => Table { generated, ..table },
            None => {
                let Some(at) = self.default_source() else { return parsed };
                let (placement, primary) = (Placement::Single(at), Vec::new());
                Table { name: name.clone(), placement, primary, columns, generated }
            }
        };
        if !matches!(table.placement, Placement::Single(_)) {
            allow_values(statement);
        }
        self.created.insert(name, table);
        parsed
    }

    /// The old name of a table that a transaction renames, and the table with its new name. Other
    /// sessions learn of it at the end.
    async fn renamed(&self, parsed: &Parsed) -> Result<Option<(String, Table)>, SqlError> {
        let Verb::Schema(statement) = &parsed.verb else { return Ok(None) };
        let Some((old, name)) = renamed(statement).filter(|_| self.in_block) else {
            return Ok(None);
        };
        // The proxy's file places a table by its name.
        if self.proxy.catalogue.table(&old).is_some() {
            return Ok(None);
        }
        let table = self.with_columns(&old).await?;
        Ok(table.map(|table| (old, Table { name, ..table })))
    }

    /// Removes the tables that do not exist from a `DROP … IF EXISTS`; none if no table is left.
    fn without_absent(&self, parsed: &Parsed) -> Option<Parsed> {
        let mut parsed = parsed.clone();
        let catalogue = self.catalogue();
        if let Verb::Schema(statement) = &mut parsed.verb
            && let Statement::Drop {
                object_type: ObjectType::Table, if_exists: true, names, ..
            } = &mut **statement
        {
            names.retain(|name| catalogue.table(&table_name(name)).is_some());
            if names.is_empty() {
                return None;
            }
        }
        Some(parsed)
    }

    /// Handles the end of a transaction that may have changed the schema.
    pub(crate) fn end_schema(&mut self, is_committed: bool) {
        if !std::mem::take(&mut self.has_schema) {
            self.created.clear();
            return;
        }
        self.proxy.kinds().clear();
        self.proxy.discovered.forget();
        for table in std::mem::take(&mut self.created).into_values() {
            // Its source may execute the commit a moment later.
            if is_committed {
                self.proxy.discovered.learn(table);
            }
        }
    }

    /// A statement in which calls of sequence functions are replaced by numbers, so that it can be
    /// described.
    fn without_sequences(&self, parsed: &Parsed) -> Option<Parsed> {
        let Verb::Data(statement) = &parsed.verb else { return None };
        if self.client != Dialect::PostgreSql {
            return None;
        }
        let count = calls(statement)?.len();
        let mut parsed = parsed.clone();
        if let Verb::Data(statement) = &mut parsed.verb {
            put_calls(statement, &vec![i64::MAX; count]);
        }
        Some(parsed)
    }

    /// The columns that a RETURNING clause returns: those of a query of the same expressions over
    /// the table.
    async fn columns_returned(&mut self, parsed: &Parsed) -> Result<Vec<Column>, SqlError> {
        let Verb::Data(statement) = &parsed.verb else { return Ok(Vec::new()) };
        let (items, table) = match &**statement {
            Statement::Insert(insert) => {
                let TableObject::TableName(name) = &insert.table else { return Ok(Vec::new()) };
                let alias = insert.table_alias.as_ref().map(|alias| format!(" AS {}", alias.alias));
                (insert.returning.as_ref(), format!("{name}{}", alias.unwrap_or_default()))
            }
            Statement::Update(update) => (update.returning.as_ref(), update.table.to_string()),
            Statement::Delete(delete) => {
                let (FromTable::WithFromKeyword(from) | FromTable::WithoutKeyword(from)) =
                    &delete.from;
                let from = from.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                (delete.returning.as_ref(), from)
            }
            _ => return Ok(Vec::new()),
        };
        let Some(items) = items else { return Ok(Vec::new()) };
        let items = items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let mut query = parse(&format!("SELECT {items} FROM {table}"), self.client)?;
        let Some(query) = query.pop() else { return Ok(Vec::new()) };
        Box::pin(self.describe(&query)).await
    }

    /// The columns of a statement's result, from one of its sources; none if it has no rows.
    pub(crate) async fn describe(&mut self, parsed: &Parsed) -> Result<Vec<Column>, SqlError> {
        let mut columns = self.described(parsed).await?;
        name_columns(parsed, self.client, &mut columns);
        Ok(columns)
    }

    async fn described(&mut self, parsed: &Parsed) -> Result<Vec<Column>, SqlError> {
        match &parsed.verb {
            Verb::Data(statement) if config_columns(statement).is_some() => {
                let names = config_columns(statement).unwrap_or_default();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                Ok(table(&names, []).columns)
            }
            Verb::Data(_) => {
                let returns = parsed.text.to_lowercase().contains("returning");
                if parsed.word() != "SELECT" && !returns {
                    return Ok(Vec::new());
                }
                let nulls = vec![Value::Null; parsed.parameters];
                // No key is NULL, so any source may be asked, and it reads no row.
                let context = Context {
                    client: self.client,
                    isolation: Isolation::ReadCommitted,
                    prefer: self.prefer(),
                    kinds: Kinds::new(),
                    collations: OrdMap::new(),
                    by_key: false,
                    default_source: self.default_source(),
                };
                self.discover(&parsed.verb).await?;
                let counted = self.without_sequences(parsed);
                let parsed = counted.as_ref().unwrap_or(parsed);
                let Verb::Data(statement) = &parsed.verb else { return Ok(Vec::new()) };
                if parsed.word() != "SELECT" {
                    return self.columns_returned(parsed).await;
                }
                let plan = match plan(&self.catalogue(), statement, &nulls, &context) {
                    Ok(plan) => self.with_source(parsed, &nulls, plan)?,
                    Err(refusal) => {
                        return self.columns_gathered(parsed, &nulls, refusal.into()).await;
                    }
                };
                if !plan.has_rows {
                    return Ok(Vec::new());
                }
                self.columns_of(parsed, &plan).await
            }
            Verb::Execute(name, values) => {
                let (parsed, _) = self.executed(name, values)?;
                Box::pin(self.describe(&parsed)).await
            }
            Verb::Fetch { name, is_move: false, .. } => {
                Ok(self.columns_of_cursor(name).unwrap_or_default())
            }
            Verb::Explain(_) => Ok(text_answer("QUERY PLAN", []).columns),
            Verb::Show(name) => Ok(text_answer(name, []).columns),
            Verb::Other if self.is_query(parsed)? => {
                let (home, _) = self
                    .home_for(&parsed.text)
                    .ok_or_else(|| SqlError::new("08006", "no source is configured"))?;
                self.columns_at(home, &unread(&parsed.text, self.client)?.text).await
            }
            Verb::Other | Verb::Admin(_) => match self.setting(parsed, &[]).await? {
                Reply::Rows(answer, _) => Ok(answer.columns),
                Reply::Done { .. } | Reply::Error(_) => Ok(Vec::new()),
            },
            _ => Ok(Vec::new()),
        }
    }

    async fn columns_of(&mut self, parsed: &Parsed, plan: &Plan) -> Result<Vec<Column>, SqlError> {
        // A source of the client's kind knows its types best: MariaDB reports booleans as numbers.
        let is_own = |part: &&Part| {
            self.proxy.catalogue.source(part.source).is_some_and(|s| s.kind == self.client)
        };
        let Some(part) = plan.parts.iter().find(is_own).or(plan.parts.first()) else {
            let parsed = self.with_variables(parsed);
            let Verb::Data(statement) = &parsed.verb else { return Ok(Vec::new()) };
            self.check_effects(&effects(statement))?;
            let (home, kind) = self
                .home_for(&parsed.text)
                .ok_or_else(|| SqlError::new("08006", "no source is configured"))?;
            let nulls = vec![Value::Null; parsed.parameters];
            return self.columns_at(home, &self.rendered(statement, &nulls, kind)?).await;
        };
        let source = part.source;
        let answer = if self.has_schema && self.open.is_some() {
            let text = part.text.trim_end_matches(" FOR UPDATE");
            let text = format!("SELECT * FROM ({text}) AS orthodrome_described LIMIT 0");
            self.ask_within(source, text).await?
        } else {
            // A source that described the statement as a derived table could run it: MariaDB does.
            let columns = self.columns_at(source, &part.text).await?;
            Answer { columns, ..Answer::default() }
        };
        let merged = merge(&plan.merge, vec![answer.clone()]).unwrap_or(answer);
        Ok(merged.columns)
    }
}

/// The query for the tables that have an index of this name.
fn tables_with_index(kind: Dialect, index: &str) -> String {
    let index = index.replace('\'', "''");
    match kind {
        Dialect::PostgreSql => format!(
            "SELECT tablename::text FROM pg_catalog.pg_indexes \
             WHERE schemaname = ANY (current_schemas(false)) AND indexname = '{index}'"
        ),
        Dialect::MariaDb => format!(
            "SELECT DISTINCT table_name FROM information_schema.statistics \
             WHERE table_schema = database() AND index_name = '{index}'"
        ),
    }
}

fn first_word(words: &[String]) -> &str {
    words.first().map_or("", String::as_str)
}

/// Whether a row of a source's system catalogue names one of the proxy's own tables.
pub(crate) fn is_own_table(cell: &[u8]) -> bool {
    const OWN: [&[u8]; 6] = [
        b"orthodrome_branches",
        b"orthodrome_proxies",
        b"orthodrome_records",
        b"orthodrome_redo",
        b"orthodrome_sequences",
        b"orthodrome_states",
    ];
    OWN.contains(&cell)
}

/// Whether SQL has statements that begin with this word; the parser may not know all of them.
fn is_command(word: &str) -> bool {
    const COMMANDS: &[&str] = &[
        "alter",
        "analyze",
        "begin",
        "call",
        "check",
        "checkpoint",
        "checksum",
        "close",
        "cluster",
        "comment",
        "commit",
        "copy",
        "create",
        "deallocate",
        "declare",
        "discard",
        "do",
        "drop",
        "end",
        "execute",
        "explain",
        "fetch",
        "flush",
        "grant",
        "handler",
        "help",
        "import",
        "install",
        "kill",
        "listen",
        "load",
        "lock",
        "move",
        "notify",
        "optimize",
        "prepare",
        "purge",
        "reassign",
        "refresh",
        "reindex",
        "release",
        "rename",
        "repair",
        "reset",
        "revoke",
        "rollback",
        "savepoint",
        "security",
        "set",
        "show",
        "shutdown",
        "signal",
        "start",
        "truncate",
        "uninstall",
        "unlisten",
        "unlock",
        "use",
        "vacuum",
        "xa",
    ];
    COMMANDS.contains(&word)
}
