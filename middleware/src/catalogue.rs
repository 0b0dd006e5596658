//! The catalogue of the one database: queries of `pg_catalog` and `information_schema`, `SHOW` and
//! `DESCRIBE`.
//!
//! One source of the client's kind answers them, its *home*. Tables that the home lacks are created
//! there, empty, in a schema of their own, and the system relations of a query are replaced by
//! queries that show this schema as the home's own.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use orthodrome_core::Key;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_geotp::sql::gather::Template;
use orthodrome_geotp::sql::shape::{Shape, moved};
use orthodrome_geotp::sql::system::{
    in_schema, in_schema_by_text, quote, replace_relations, system_relations,
};
use orthodrome_geotp::sql::{Answer, Dialect, SourceId};
use tokio::sync::RwLock;

use super::discovery::KEPT;
use super::driver::Setting;
use super::errors::SqlError;
use super::session::Session;
use super::shapes::{cell, questions, shapes};

/// Time limit for a source's description of its tables. That is the work of seconds on a busy machine,
/// and a source that cannot be reached is known by the time limit of its connection.
const SILENT: Duration = Duration::from_secs(30);

/// How long the proxy asks again at each query after a change of the schema: a source may execute
/// a commit a moment after its client knows of it.
const UNSETTLED: Duration = Duration::from_secs(2);

/// The beginning of the names of all schemas of catalogues.
const SCHEMAS: &str = "orthodrome_catalogue_";

/// The catalogues, by the kind of their clients.
pub(crate) struct Catalogues {
    postgres: Slot,
    maria: Slot,
    /// The schemas of the tables that homes lack, at PostgreSQL and at MariaDB.
    schemas: (String, String),
    /// False if each catalogue is that of its home alone.
    is_on: bool,
}

/// The catalogue of one kind of clients.
#[derive(Default)]
struct Slot {
    shown: Mutex<Arc<Shown>>,
    /// Held by who brings the tables up to date. At MariaDB that is no transaction, so queries hold
    /// it as readers.
    making: RwLock<()>,
}

impl Slot {
    fn now(&self) -> Arc<Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, shown: Shown) {
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(shown);
    }
}

/// What a catalogue shows in addition to the home's own.
#[derive(Clone, Default)]
struct Shown {
    /// When the sources were asked; none if the home may have another state.
    since: Option<Instant>,
    /// The statements that have created the tables.
    made: Vec<String>,
    /// The tables that the home lacks.
    tables: OrdSet<String>,
    /// Tables of the home that belong to other sources, so they are not shown.
    hidden: OrdSet<String>,
    /// The home's own schema.
    own: String,
    /// The columns of the system relations.
    relations: OrdMap<String, Vec<String>>,
    /// The last definitions of each source.
    known: OrdMap<SourceId, OrdMap<String, Shape>>,
    /// The last statements with which sources of MariaDB have described tables.
    described: OrdMap<SourceId, OrdMap<String, String>>,
}

/// What the home says of itself.
struct Home {
    own: String,
    is_made: bool,
    tables: OrdSet<String>,
    relations: OrdMap<String, Vec<String>>,
}

impl Catalogues {
    /// The catalogues of the proxy with this number. Schemas of PostgreSQL are in a database, where
    /// nobody else has this number. Those of MariaDB are databases, so they have the names of all
    /// databases that the proxy serves in theirs: another proxy with this number serves others.
    pub(crate) fn new(number: u32, databases: &OrdSet<String>, is_on: bool) -> Self {
        let served: String = databases.iter().flat_map(|name| [name, "\0"]).collect();
        let postgres = format!("{SCHEMAS}{number}");
        let maria = format!("{postgres}_{:016x}", Key::from(served).place());
        Self {
            postgres: Slot::default(),
            maria: Slot::default(),
            schemas: (postgres, maria),
            is_on,
        }
    }

    fn schema(&self, kind: Dialect) -> &str {
        match kind {
            Dialect::PostgreSql => &self.schemas.0,
            Dialect::MariaDb => &self.schemas.1,
        }
    }

    fn of(&self, kind: Dialect) -> &Slot {
        match kind {
            Dialect::PostgreSql => &self.postgres,
            Dialect::MariaDb => &self.maria,
        }
    }
}

/// What a statement asks the catalogue for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asks {
    /// Tables, or what they consist of.
    Tables,
    /// Databases, schemas, or details of tables that are already known.
    Schemas,
    /// Neither.
    Nothing,
}

/// What SHOW of MySQL shows of tables.
const SHOWS: [&str; 9] =
    ["tables", "columns", "fields", "create", "index", "indexes", "keys", "table", "triggers"];

/// The beginnings of tables of `information_schema` that are not about tables.
const NOT_ABOUT_TABLES: [&str; 15] = [
    "processlist",
    "collation",
    "character_sets",
    "engines",
    "plugins",
    "all_plugins",
    "global_",
    "session_",
    "system_",
    "innodb_",
    "keywords",
    "schemata",
    "sql_",
    "profiling",
    "enabled_roles",
];

/// System relations of PostgreSQL that name the schemas of tables.
const ABOUT_TABLES: [(&str, &str); 5] = [
    ("pg_class", "relnamespace"),
    ("pg_constraint", "connamespace"),
    ("pg_tables", "schemaname"),
    ("pg_indexes", "schemaname"),
    ("pg_views", "schemaname"),
];

fn asks(text: &str, kind: Dialect) -> Result<Asks, SqlError> {
    let relations = system_relations(text, kind)?;
    let is_about_tables = |name: &String| match name.strip_prefix("information_schema.") {
        Some(table) => !NOT_ABOUT_TABLES.iter().any(|other| table.starts_with(other)),
        None => {
            ABOUT_TABLES.iter().any(|(table, _)| name.strip_prefix("pg_catalog.") == Some(table))
        }
    };
    let lower = text.to_lowercase();
    let words: Vec<&str> = lower.split_whitespace().take(3).collect();
    let is_show = match words.as_slice() {
        ["desc" | "describe", ..] => true,
        ["explain", _] => true,
        ["show", "full" | "extended", what, ..] | ["show", what, ..] => SHOWS.contains(what),
        _ => false,
    };
    Ok(match kind {
        _ if relations.iter().any(is_about_tables) => Asks::Tables,
        Dialect::PostgreSql if lower.contains("regclass") => Asks::Tables,
        Dialect::MariaDb if is_show => Asks::Tables,
        // An expression may name a table, and a number may be that of a table.
        Dialect::PostgreSql if lower.contains("pg_") => Asks::Schemas,
        Dialect::PostgreSql | Dialect::MariaDb if !relations.is_empty() => Asks::Schemas,
        Dialect::MariaDb if lower.starts_with("show ") => Asks::Schemas,
        Dialect::PostgreSql | Dialect::MariaDb => Asks::Nothing,
    })
}

fn constant(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

fn list<'a>(names: impl IntoIterator<Item = &'a String>) -> String {
    names.into_iter().map(|name| constant(name)).collect::<Vec<_>>().join(", ")
}

/// The queries for what a home says of itself: its schema, whether it has the catalogue's, its
/// tables and views, and the columns of system relations.
fn home_questions(kind: Dialect, schema: &str) -> String {
    match kind {
        Dialect::PostgreSql => format!(
            "SELECT current_schema(), EXISTS (SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = '{schema}')::int; \
             SELECT relname FROM pg_catalog.pg_class WHERE relnamespace = current_schema()::regnamespace \
             AND relkind IN ('r', 'p', 'v', 'm', 'f'); \
             SELECT n.nspname || '.' || c.relname, a.attname FROM pg_catalog.pg_attribute a \
             JOIN pg_catalog.pg_class c ON c.oid = a.attrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
             WHERE a.attnum > 0 AND (n.nspname = 'information_schema' OR n.nspname = 'pg_catalog' \
             AND c.relname IN ('pg_class', 'pg_constraint', 'pg_tables', 'pg_indexes', 'pg_views')) \
             ORDER BY 1, a.attnum"
        ),
        Dialect::MariaDb => format!(
            "SELECT database(), EXISTS (SELECT 1 FROM information_schema.schemata WHERE schema_name = '{schema}'); \
             SELECT table_name FROM information_schema.tables WHERE table_schema = database(); \
             SELECT concat('information_schema.', lower(table_name)), column_name FROM information_schema.columns \
             WHERE table_schema = 'information_schema' ORDER BY table_name, ordinal_position"
        ),
    }
}

impl Home {
    fn of(answers: &[Answer]) -> Option<Self> {
        let [itself, tables, columns] = answers else { return None };
        let row = itself.rows.first()?;
        let mut relations: OrdMap<String, Vec<String>> = OrdMap::new();
        for row in &columns.rows {
            relations.entry(cell(row, 0)?).or_default().push(cell(row, 1)?);
        }
        Some(Self {
            own: cell(row, 0)?,
            is_made: cell(row, 1)? == "1",
            tables: tables.rows.iter().filter_map(|row| cell(row, 0)).collect(),
            relations,
        })
    }
}

impl Shown {
    /// The query that replaces a system relation; none if it stays.
    fn query_of(&self, relation: &str, kind: Dialect, schema: &str) -> Option<String> {
        if relation == "pg_catalog.pg_namespace" {
            return Some(format!(
                "SELECT * FROM {relation} WHERE nspname NOT LIKE '{}%'",
                SCHEMAS.replace('_', "\\_")
            ));
        }
        let columns = self.relations.get(relation)?;
        match kind {
            Dialect::PostgreSql => self.postgres_query(relation, columns, schema),
            Dialect::MariaDb => self.maria_query(relation, columns, schema),
        }
    }

    fn postgres_query(&self, relation: &str, columns: &[String], schema: &str) -> Option<String> {
        let (own, schema) = (constant(&self.own), constant(schema));
        let others = format!("LIKE '{}%'", SCHEMAS.replace('_', "\\_"));
        let bare = relation.strip_prefix("pg_catalog.");
        let named = ABOUT_TABLES.iter().find(|(name, _)| Some(*name) == bare).map(|(_, it)| *it);
        let is_schema = |column: &String| match named {
            Some(name) => column == name,
            None => column.ends_with("_schema") || column == "schema_name",
        };
        let main = columns
            .iter()
            .find(|column| **column == "table_schema")
            .or_else(|| columns.iter().find(|column| is_schema(column)))?;
        let select = columns.iter().map(|column| {
            let name = quote(column, Dialect::PostgreSql);
            if !is_schema(column) {
                return name;
            }
            if column.ends_with("namespace") {
                return format!(
                    "CASE {name} WHEN pg_catalog.to_regnamespace({schema})::oid THEN {own}::regnamespace::oid ELSE {name} END AS {name}"
                );
            }
            let of = if named.is_some() { "name" } else { "information_schema.sql_identifier" };
            format!("CASE {name}::text WHEN {schema} THEN {own} ELSE {name}::text END::{of} AS {name}")
        });
        let select = select.collect::<Vec<_>>().join(", ");
        let (is_foreign, is_own) = if main.ends_with("namespace") {
            let foreign = format!(
                "{main} IN (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname {others} AND nspname <> {schema})"
            );
            (foreign, format!("{main} = {own}::regnamespace"))
        } else if main == "schema_name" {
            (format!("{main}::text {others}"), "false".to_owned())
        } else {
            (
                format!("{main}::text {others} AND {main}::text <> {schema}"),
                format!("{main}::text = {own}"),
            )
        };
        let mut query = format!("SELECT {select} FROM {relation} WHERE NOT ({is_foreign})");
        let of_table = ["table_name", "tablename", "relname"];
        let name = columns.iter().find(|column| of_table.contains(&column.as_str()));
        if let (Some(name), false) = (name, self.hidden.is_empty()) {
            let hidden = list(&self.hidden);
            query.push_str(&format!(" AND NOT ({is_own} AND {name}::text IN ({hidden}))"));
        }
        Some(query)
    }

    fn maria_query(&self, relation: &str, columns: &[String], schema: &str) -> Option<String> {
        const MAIN: [&str; 6] = [
            "TABLE_SCHEMA",
            "CONSTRAINT_SCHEMA",
            "TRIGGER_SCHEMA",
            "ROUTINE_SCHEMA",
            "EVENT_SCHEMA",
            "SCHEMA_NAME",
        ];
        /// What a table with rows would have, and an empty one has not.
        const UNKNOWN: [&str; 13] = [
            "TABLE_ROWS",
            "AVG_ROW_LENGTH",
            "DATA_LENGTH",
            "MAX_DATA_LENGTH",
            "INDEX_LENGTH",
            "DATA_FREE",
            "AUTO_INCREMENT",
            "CREATE_TIME",
            "UPDATE_TIME",
            "CHECK_TIME",
            "CHECKSUM",
            "MAX_INDEX_LENGTH",
            "CARDINALITY",
        ];
        let main = MAIN.iter().find(|main| columns.iter().any(|column| column == *main))?;
        let maria = Dialect::MariaDb;
        let names = |column: &String| quote(column, maria);
        let all = columns.iter().map(names).collect::<Vec<_>>().join(", ");
        let own = constant(&self.own);
        if *main == "SCHEMA_NAME" {
            return Some(format!(
                "SELECT {all} FROM {relation} WHERE {main} IN ({own}, 'information_schema')"
            ));
        }
        let moved = columns.iter().map(|column| {
            let name = names(column);
            if UNKNOWN.contains(&column.as_str()) {
                return format!("NULL AS {name}");
            }
            if column.ends_with("_SCHEMA") {
                return format!("IF({name} = '{schema}', {own}, {name}) AS {name}");
            }
            name
        });
        let moved = moved.collect::<Vec<_>>().join(", ");
        let mut first = format!("SELECT {all} FROM {relation} WHERE {main} = {own}");
        if columns.iter().any(|column| column == "TABLE_NAME") && !self.hidden.is_empty() {
            first.push_str(&format!(" AND TABLE_NAME NOT IN ({})", list(&self.hidden)));
        }
        Some(format!("{first} UNION ALL SELECT {moved} FROM {relation} WHERE {main} = '{schema}'"))
    }

    /// The answer with the home's own schema instead of the catalogue's. Before the first refresh
    /// that is not known.
    fn as_own(&self, answer: &mut Answer, schema: &str) {
        if self.own.is_empty() {
            return;
        }
        for cell in answer.rows.iter_mut().flatten().flatten() {
            if let Ok(text) = std::str::from_utf8(cell)
                && text.contains(schema)
            {
                *cell = text.replace(schema, &self.own).into_bytes();
            }
        }
    }
}

/// Waits for a lock of the catalogue, which another client may hold during a long query.
async fn in_time<T>(locked: impl Future<Output = T>) -> Result<T, SqlError> {
    let busy = |_| SqlError::new("55000", "another client uses the catalogue; try again");
    tokio::time::timeout(SILENT, locked).await.map_err(busy)
}

/// The columns of `SHOW TABLE STATUS`, and those of `information_schema.tables`.
const STATUS: [(&str, &str); 20] = [
    ("TABLE_NAME", "Name"),
    ("ENGINE", "Engine"),
    ("VERSION", "Version"),
    ("ROW_FORMAT", "Row_format"),
    ("TABLE_ROWS", "Rows"),
    ("AVG_ROW_LENGTH", "Avg_row_length"),
    ("DATA_LENGTH", "Data_length"),
    ("MAX_DATA_LENGTH", "Max_data_length"),
    ("INDEX_LENGTH", "Index_length"),
    ("DATA_FREE", "Data_free"),
    ("AUTO_INCREMENT", "Auto_increment"),
    ("CREATE_TIME", "Create_time"),
    ("UPDATE_TIME", "Update_time"),
    ("CHECK_TIME", "Check_time"),
    ("TABLE_COLLATION", "Collation"),
    ("CHECKSUM", "Checksum"),
    ("CREATE_OPTIONS", "Create_options"),
    ("TABLE_COMMENT", "Comment"),
    ("MAX_INDEX_LENGTH", "Max_index_length"),
    ("TEMPORARY", "Temporary"),
];

/// True if a text is one constant of MySQL in single quotes.
fn is_constant(text: &str) -> bool {
    let Some(mut rest) = text.strip_prefix('\'').map(str::chars) else { return false };
    loop {
        match rest.next() {
            None => return false,
            Some('\\') => drop(rest.next()),
            Some('\'') if rest.as_str().is_empty() => return true,
            Some('\'') if rest.next() != Some('\'') => return false,
            Some(_) => {}
        }
    }
}

/// `SHOW TABLES` or `SHOW TABLE STATUS` as a query; none if the statement is another one, about
/// another database, or has a condition that reads tables. `columns` are those of
/// `information_schema.tables`.
fn show_tables(
    text: &str,
    words: &[String],
    databases: &OrdSet<String>,
    own: &str,
    columns: &[String],
) -> Option<String> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (is_full, is_status, rest) = match words.as_slice() {
        ["show", "full", "tables", rest @ ..] => (true, false, rest),
        ["show", "tables", rest @ ..] => (false, false, rest),
        ["show", "table", "status", rest @ ..] => (false, true, rest),
        _ => return None,
    };
    let of_database = match rest {
        ["from" | "in", name, ..] => Some(*name),
        _ => None,
    };
    let is_other = |name: &str| !databases.iter().any(|known| known.eq_ignore_ascii_case(name));
    if of_database.is_some_and(is_other) {
        return None;
    }
    let lower = text.to_lowercase();
    let after = |word: &str| {
        let at = lower.find(&format!(" {word} "))?;
        text.get(at + word.len() + 2..).map(str::trim)
    };
    let kind = if is_full { ", TABLE_TYPE AS `Table_type`" } else { "" };
    let status = STATUS.iter().filter(|(name, _)| columns.iter().any(|column| column == name));
    let status: Vec<String> = status.map(|(name, shown)| format!("{name} AS `{shown}`")).collect();
    let of = |name: &str| {
        let shown = if is_status {
            status.join(", ")
        } else {
            format!("TABLE_NAME AS {}{kind}", quote(name, Dialect::MariaDb))
        };
        format!(
            "SELECT {shown} FROM information_schema.tables WHERE TABLE_SCHEMA = {}",
            constant(own)
        )
    };
    let column = format!("Tables_in_{own}");
    let rest = rest.get(if of_database.is_some() { 2 } else { 0 }..).unwrap_or_default();
    Some(match rest.first() {
        None => format!("{} ORDER BY 1", of(&column)),
        Some(&"like") => {
            let pattern = after("like").filter(|pattern| is_constant(pattern))?;
            let name = format!("{column} ({})", pattern.trim_matches('\''));
            format!("{} AND TABLE_NAME LIKE {pattern} ESCAPE '\\' ORDER BY 1", of(&name))
        }
        // A query in a condition would read outside of the transaction.
        Some(&"where") if rest.iter().any(|word| matches!(*word, "select" | "table" | "with")) => {
            return None;
        }
        Some(&"where") => {
            format!("SELECT * FROM ({}) AS shown WHERE {} ORDER BY 1", of(&column), after("where")?)
        }
        Some(_) => return None,
    })
}

/// Whether a statement of a MySQL client describes a table that it names.
fn is_description(words: &[String]) -> bool {
    words.first().is_some_and(|word| matches!(&**word, "show" | "desc" | "describe" | "explain"))
}

impl Session {
    /// The source whose catalogue clients of this kind see.
    pub(crate) fn catalogue_home(&self) -> Option<SourceId> {
        let kind = |at: SourceId| self.proxy.catalogue.source(at).map(|source| source.kind);
        let own = self.default_source().filter(|at| kind(*at) == Some(self.client));
        let mut all = self.proxy.catalogue.sources();
        own.or_else(|| all.find(|(_, s)| s.kind == self.client).map(|(id, _)| id))
    }

    /// Whether a query is about the tables themselves.
    pub(crate) fn asks_catalogue(&self, text: &str) -> Result<bool, SqlError> {
        Ok(self.proxy.catalogues.is_on && asks(text, self.client)? != Asks::Nothing)
    }

    /// Where the home has these tables, and the home.
    pub(crate) async fn templates(
        &self,
        tables: &[String],
    ) -> Result<(SourceId, OrdMap<String, Template>), SqlError> {
        let proxy = self.proxy.clone();
        let home = self.catalogue_home().filter(|_| proxy.catalogues.is_on).ok_or_else(|| {
            SqlError::new(
                "0A000",
                "no source can answer this query by itself; to gather its rows, the proxy needs `catalogue = \"all\"` \
                 and a source of the client's kind",
            )
        })?;
        self.refresh(home).await?;
        let (shown, client) = (proxy.catalogues.of(self.client).now(), self.client);
        let schema = proxy.catalogues.schema(client);
        let mut found = OrdMap::new();
        for table in tables {
            let is_it = |name: &&String| name.eq_ignore_ascii_case(table);
            let copy = shown.tables.iter().find(is_it);
            if copy.is_none() && shown.hidden.iter().any(|name| is_it(&name)) {
                continue;
            }
            let (schema, name) = copy.map_or((&*shown.own, table), |name| (schema, name));
            let name = format!("{}.{}", quote(schema, client), quote(name, client));
            let is_copy = copy.is_some();
            let (unordered, documents) = (OrdSet::new(), OrdMap::new());
            found.insert(table.clone(), Template { name, is_copy, unordered, documents });
        }
        // Columns that a source of the client's kind treats otherwise than their text.
        let types = match client {
            Dialect::MariaDb => "'enum', 'set', 'bit'",
            Dialect::PostgreSql => "'json', 'jsonb'",
        };
        let (schemas, names) = (list([&shown.own, &schema.to_owned()]), list(tables));
        let question = format!(
            "SELECT lower(table_name), lower(column_name), lower(data_type) FROM information_schema.columns \
             WHERE table_schema IN ({schemas}) AND lower(table_name) IN ({names}) \
             AND data_type IN ({types})"
        );
        let answers = self.answers_in_time(home, &question).await?;
        for row in answers.iter().flat_map(|answer| &answer.rows) {
            let (Some(table), Some(column)) = (cell(row, 0), cell(row, 1)) else { continue };
            let of = cell(row, 2).unwrap_or_default();
            if let Some(template) = found.get_mut(&table) {
                match client {
                    Dialect::MariaDb => drop(template.unordered.insert(column)),
                    Dialect::PostgreSql => drop(template.documents.insert(column, of)),
                }
            }
        }
        Ok((home, found))
    }

    /// Runs a query batch at a source. If it asks the home's catalogue, the answer is about the
    /// tables of all sources.
    pub(crate) async fn ask_catalogue(
        &self,
        at: SourceId,
        text: &str,
        words: &[String],
        may_leave: bool,
    ) -> Result<Answer, SqlError> {
        let proxy = self.proxy.clone();
        let catalogues = &proxy.catalogues;
        if !catalogues.is_on || self.catalogue_home() != Some(at) {
            return self.ask(at, text, may_leave).await;
        }
        let asked = asks(text, self.client)?;
        if asked == Asks::Nothing {
            return self.ask(at, text, may_leave).await;
        }
        if asked == Asks::Tables {
            self.refresh(at).await?;
        }
        let schema = catalogues.schema(self.client);
        let slot = catalogues.of(self.client);
        let is_held = (self.client, asked) == (Dialect::MariaDb, Asks::Tables);
        let _held = if is_held { Some(in_time(slot.making.read()).await?) } else { None };
        let shown = slot.now();
        if asked == Asks::Tables && shown.since.is_none() {
            // Another client has asked meanwhile, and its answer is an error.
            let why = "the tables of all sources are not known at the moment; try again";
            return Err(SqlError::new("55000", why));
        }
        let databases = &proxy.databases;
        let has_more = !shown.tables.is_empty() || !shown.hidden.is_empty();
        let words_of = |count: usize| words.get(..count).unwrap_or_default().join(" ");
        let mut text = text.to_owned();
        if has_more {
            let columns = shown.relations.get("information_schema.tables");
            let columns = columns.map(Vec::as_slice).unwrap_or_default();
            if let Some(query) = show_tables(&text, words, databases, &shown.own, columns) {
                text = query;
            } else if self.client == Dialect::MariaDb && is_description(words) {
                text = in_schema(&text, self.client, schema, |name| shown.tables.contains(name))?;
            } else if self.client == Dialect::PostgreSql {
                let is_it = |name: &str| shown.tables.contains(name);
                text = in_schema_by_text(&text, &shown.own, schema, is_it)?;
            }
        }
        let only_this =
            "SELECT * FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()";
        let text = replace_relations(&text, self.client, |relation| match relation {
            "pg_catalog.pg_database" => Some(only_this.to_owned()),
            relation if has_more => shown.query_of(relation, self.client, schema),
            _ => None,
        })?;
        let settings = self.with_path(schema, has_more);
        let mut answer = self.ask_as(at, &text, &settings, may_leave).await?;
        if matches!(&*words_of(2), "show databases" | "show schemas") {
            let is_this = |name: &String| databases.contains(name) || name == "information_schema";
            answer.rows.retain(|row| cell(row, 0).is_some_and(|name| is_this(&name)));
        }
        shown.as_own(&mut answer, schema);
        let is_foreign = |cell: &Vec<u8>| cell.starts_with(SCHEMAS.as_bytes());
        answer.rows.retain(|row| !row.iter().flatten().any(is_foreign));
        Ok(answer)
    }

    /// The types of a statement's parameters at the home of the catalogue.
    pub(crate) async fn types_at_home(&self, text: &str) -> Result<Vec<u32>, SqlError> {
        let proxy = self.proxy.clone();
        let unknown = || SqlError::new("42P18", "the types of parameters are not known");
        let home = self.catalogue_home().ok_or_else(unknown)?;
        let source = proxy.direct.get(&home).ok_or_else(unknown)?;
        if proxy.catalogues.is_on {
            self.refresh(home).await?;
        }
        let shown = proxy.catalogues.of(self.client).now();
        let schema = proxy.catalogues.schema(self.client);
        let settings = self.with_path(schema, !shown.tables.is_empty());
        let described = source.described_until(text, &settings, std::future::pending());
        let described = tokio::time::timeout(SILENT, described).await.map_err(|_| unknown())?;
        described.map(|described| described.parameters).map_err(|_| unknown())
    }

    /// The client's settings, with the schema of the catalogue before all others.
    fn with_path(&self, schema: &str, has_more: bool) -> Vec<Setting> {
        let mut settings = self.settings.at(self.client);
        if self.client == Dialect::MariaDb || !has_more {
            return settings;
        }
        let found = settings.iter_mut().find(|setting| setting.name == "search_path");
        let value = |rest: &str| format!("{schema}, {rest}");
        match found {
            Some(setting) => setting.value = value(&setting.value),
            None => settings
                .push(Setting { name: "search_path".into(), value: value("\"$user\", public") }),
        }
        settings
    }

    /// Brings the schema of the catalogue up to date, unless it is.
    async fn refresh(&self, home: SourceId) -> Result<(), SqlError> {
        let proxy = self.proxy.clone();
        let slot = proxy.catalogues.of(self.client);
        let is_fresh = |shown: &Shown| {
            let changed = proxy.discovered.changed();
            shown.since.is_some_and(|since| {
                since.elapsed() < KEPT && changed.is_none_or(|changed| since > changed + UNSETTLED)
            })
        };
        if is_fresh(&slot.now()) {
            return Ok(());
        }
        let _making = in_time(slot.making.write()).await?;
        let mut shown = Shown::clone(&slot.now());
        if is_fresh(&shown) {
            return Ok(());
        }
        let since = Instant::now();
        // While this is under way, and if it fails, nobody may use the old state.
        let was_known = shown.since.take().is_some();
        slot.set(shown.clone());
        let questions = home_questions(self.client, proxy.catalogues.schema(self.client));
        let answers = self.answers_in_time(home, &questions).await?;
        let broken = || SqlError::new("XX000", "a source did not describe its system catalogue");
        let itself = Home::of(&answers).ok_or_else(broken)?;
        self.learn_shapes(home, &mut shown).await?;
        let (wanted, hidden) = self.wanted(home, &itself, &shown.known);
        self.learn_statements(&wanted, &mut shown).await?;
        let made = self.statements(&wanted, &shown.described)?;
        let is_there = was_known && itself.is_made != made.is_empty() && made == shown.made;
        if !is_there && (itself.is_made || !made.is_empty()) {
            self.make(home, &itself.own, itself.is_made, &made).await?;
        }
        slot.set(Shown {
            since: Some(since),
            made,
            tables: wanted.into_iter().map(|(_, shape)| shape.name).collect(),
            hidden,
            own: itself.own,
            relations: itself.relations,
            known: shown.known,
            described: shown.described,
        });
        Ok(())
    }

    /// The answers of a source. One that is silent is not reached: other clients wait for these
    /// answers, too.
    async fn answers_in_time(&self, at: SourceId, text: &str) -> Result<Vec<Answer>, SqlError> {
        let silent = |_| SqlError::new("08006", "a source does not describe its tables in time");
        tokio::time::timeout(SILENT, self.answers(at, text)).await.map_err(silent)?
    }

    /// Asks every other source for its tables. A source that cannot be reached has those that it
    /// had.
    async fn learn_shapes(&self, home: SourceId, shown: &mut Shown) -> Result<(), SqlError> {
        for (at, source) in self.proxy.catalogue.sources() {
            if at == home {
                continue;
            }
            match self.answers_in_time(at, &questions(source.kind)).await {
                Ok(answers) => {
                    shown.known.insert(at, shapes(source.kind, &answers));
                }
                Err(gone) if gone.sqlstate == "08006" && shown.known.contains_key(&at) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The tables that the home lacks, with their sources, and those that it has and that belong to
    /// other sources.
    fn wanted(
        &self,
        home: SourceId,
        itself: &Home,
        known: &OrdMap<SourceId, OrdMap<String, Shape>>,
    ) -> (Vec<(SourceId, Shape)>, OrdSet<String>) {
        let kind = |at: &SourceId| self.proxy.catalogue.source(*at).map(|source| source.kind);
        let is_at = |name: &str, at: SourceId| {
            let table = self.proxy.catalogue.table(&name.to_lowercase());
            table.map(|table| table.sources().contains(&at))
        };
        let belongs = |name: &String| is_at(name, home) != Some(false);
        let hidden: OrdSet<String> =
            itself.tables.iter().filter(|name| !belongs(name)).cloned().collect();
        let mut wanted: OrdMap<String, (SourceId, Shape)> = OrdMap::new();
        let (same, other): (Vec<SourceId>, Vec<SourceId>) =
            known.keys().partition(|at| kind(at) == Some(self.client));
        for at in same.into_iter().chain(other) {
            for (name, shape) in known.get(&at).into_iter().flatten() {
                let is_native = itself.tables.contains(name) && belongs(name);
                let is_own = super::elsewhere::is_own_table(name.as_bytes());
                if is_native || is_own || is_at(name, at) == Some(false) {
                    continue;
                }
                wanted.entry(name.clone()).or_insert_with(|| (at, shape.clone()));
            }
        }
        (wanted.into_values().collect(), hidden)
    }

    /// The statements that create these tables in the schema of the catalogue.
    fn statements(
        &self,
        wanted: &[(SourceId, Shape)],
        described: &OrdMap<SourceId, OrdMap<String, String>>,
    ) -> Result<Vec<String>, SqlError> {
        let (to, schema) = (self.client, self.proxy.catalogues.schema(self.client));
        let mut taken: OrdSet<String> =
            wanted.iter().map(|(_, shape)| shape.name.clone()).collect();
        let own = |at: &SourceId, name: &String| described.get(at)?.get(name);
        // Statements of MariaDB have their foreign keys.
        let with_statement = wanted.iter().filter(|(at, shape)| own(at, &shape.name).is_some());
        let references = with_statement.flat_map(|(_, shape)| &shape.references);
        let mut referring: OrdSet<String> = references.map(|it| it.name.clone()).collect();
        let (mut made, mut after) = (Vec::new(), Vec::new());
        let kind = |at: SourceId| self.proxy.catalogue.source(at).map_or(to, |it| it.kind);
        // Keys of the client's kind of source come first, because they keep their names.
        let (same, others): (Vec<_>, Vec<_>) = wanted.iter().partition(|(at, _)| kind(*at) == to);
        for (at, shape) in same.into_iter().chain(others) {
            let from = kind(*at);
            if let Some(statement) = own(at, &shape.name) {
                made.push(moved(statement, &shape.name, schema).ok_or_else(|| {
                    SqlError::new(
                        "0A000",
                        format!(
                            "the proxy cannot show table {}, because it cannot read its definition: {statement}",
                            shape.name
                        ),
                    )
                })?);
                continue;
            }
            made.extend(shape.create(schema, from, to, &mut taken));
            // A table of this name at another source may be another one.
            let table = |name: &str| {
                let mut all = wanted.iter().filter(|(of, _)| of == at);
                all.find(|(_, shape)| shape.name == name).map(|(_, shape)| shape)
            };
            after.extend(shape.refer(schema, from, to, table, &mut referring));
        }
        made.extend(after);
        Ok(made)
    }

    /// Asks the sources of MariaDB, for a home of MariaDB, with which statements they describe these
    /// tables. One that cannot be reached describes them as before.
    async fn learn_statements(
        &self,
        wanted: &[(SourceId, Shape)],
        shown: &mut Shown,
    ) -> Result<(), SqlError> {
        for (at, source) in self.proxy.catalogue.sources() {
            if (self.client, source.kind) != (Dialect::MariaDb, Dialect::MariaDb) {
                continue;
            }
            let of_source = wanted.iter().filter(|(of, _)| *of == at);
            let names: Vec<&String> = of_source.map(|(_, shape)| &shape.name).collect();
            if names.is_empty() {
                continue;
            }
            let one = |name: &&String| format!("SHOW CREATE TABLE {}", quote(name, self.client));
            let text = names.iter().map(one).collect::<Vec<_>>().join(";\n");
            let answers = match self.answers_in_time(at, &text).await {
                Ok(answers) => answers,
                Err(gone) if gone.sqlstate == "08006" && shown.described.contains_key(&at) => {
                    continue;
                }
                Err(error) => return Err(error),
            };
            let statement = |answer: &Answer| cell(answer.rows.first()?, 1);
            let told = names.into_iter().zip(&answers);
            let told = told.filter_map(|(name, answer)| Some((name.clone(), statement(answer)?)));
            shown.described.insert(at, told.collect());
        }
        Ok(())
    }

    /// Creates the schema of the catalogue anew, with these tables; without any, it is removed.
    async fn make(
        &self,
        home: SourceId,
        own: &str,
        is_made: bool,
        made: &[String],
    ) -> Result<(), SqlError> {
        let schema = self.proxy.catalogues.schema(self.client);
        let mut text = Vec::new();
        match self.client {
            Dialect::PostgreSql => {
                if is_made {
                    text.push(format!("DROP SCHEMA {schema} CASCADE"));
                }
                if !made.is_empty() {
                    text.push(format!("CREATE SCHEMA {schema}"));
                    let own = quote(own, self.client);
                    text.push(format!("SET LOCAL search_path = {schema}, {own}"));
                }
            }
            Dialect::MariaDb => {
                if is_made {
                    text.push(format!("DROP DATABASE {schema}"));
                }
                if !made.is_empty() {
                    text.push(format!(
                        "CREATE DATABASE {schema} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
                    ));
                    text.push("SET foreign_key_checks = 0".into());
                }
            }
        }
        text.extend(made.iter().cloned());
        let failed = self.ask_as(home, &text.join(";\n"), &[], true).await.map(drop);
        failed.map_err(|error| {
            let name = self.proxy.catalogue.source(home).map_or("", |source| &source.name);
            SqlError {
                message: format!(
                    "source {name} cannot show the tables of other sources, because it does not create \
                     {schema}: {}; `orthodrome proxy --check` names missing privileges, and `catalogue = \"one\"` \
                     in the proxy's file shows the tables of this source only",
                    error.message
                ),
                ..error
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(relation: &str, columns: &[&str]) -> Shown {
        let columns = columns.iter().map(|column| (*column).to_owned()).collect();
        Shown {
            tables: OrdSet::from(["t".to_owned()]),
            own: "bank".into(),
            relations: OrdMap::from([(relation.to_owned(), columns)]),
            ..Shown::default()
        }
    }

    #[test]
    fn only_questions_about_tables_ask_all_sources() {
        let (postgres, maria) = (Dialect::PostgreSql, Dialect::MariaDb);
        for (text, kind, wanted) in [
            ("SELECT 1", postgres, Asks::Nothing),
            ("SELECT 'pg_class'::regclass", postgres, Asks::Tables),
            ("SELECT relname FROM pg_class", postgres, Asks::Tables),
            ("SELECT datname FROM pg_catalog.pg_database", postgres, Asks::Schemas),
            ("SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef", postgres, Asks::Schemas),
            ("SELECT * FROM information_schema.columns", postgres, Asks::Tables),
            ("SHOW FULL TABLES", maria, Asks::Tables),
            ("SHOW VARIABLES LIKE 'tables'", maria, Asks::Schemas),
            ("DESCRIBE t", maria, Asks::Tables),
            ("EXPLAIN t", maria, Asks::Tables),
            ("SELECT * FROM information_schema.processlist", maria, Asks::Schemas),
            ("SELECT @@version", maria, Asks::Nothing),
        ] {
            assert_eq!(asks(text, kind).unwrap(), wanted, "{text}");
        }
    }

    #[test]
    fn proxies_of_other_databases_have_other_catalogues_at_one_server() {
        let catalogues = |number, name: &str| {
            let made = Catalogues::new(number, &OrdSet::from([name.to_owned()]), true);
            [Dialect::PostgreSql, Dialect::MariaDb].map(|kind| made.schema(kind).to_owned())
        };
        let [postgres, maria] = catalogues(1, "bank");
        assert_eq!(postgres, "orthodrome_catalogue_1");
        assert!(maria.starts_with("orthodrome_catalogue_1_") && maria.len() <= 64, "{maria}");
        assert_eq!(catalogues(1, "bank"), [postgres, maria.clone()]);
        assert_ne!(catalogues(1, "shop"), catalogues(1, "bank"));
        assert_ne!(catalogues(2, "bank"), catalogues(1, "bank"));
    }

    #[test]
    fn show_tables_is_a_query_of_the_database() {
        let databases = OrdSet::from(["bank".to_owned()]);
        let told = |text: &str| {
            let words = orthodrome_geotp::sql::unread(text, Dialect::MariaDb).unwrap().words;
            let columns = ["TABLE_NAME".to_owned(), "TABLE_ROWS".to_owned()];
            show_tables(text, &words, &databases, "bank", &columns)
        };
        let query = "TABLE_NAME AS `Tables_in_bank`";
        assert!(told("SHOW TABLES").unwrap().contains(query));
        assert!(
            told("SHOW FULL TABLES FROM `bank`").unwrap().contains("TABLE_TYPE AS `Table_type`")
        );
        assert!(told("SHOW TABLES LIKE 'a%'").unwrap().contains("`Tables_in_bank (a%)`"));
        assert!(
            told("SHOW TABLES WHERE Tables_in_bank = 'a'")
                .unwrap()
                .contains("WHERE Tables_in_bank = 'a'")
        );
        assert_eq!(told("SHOW TABLES FROM mysql"), None);
        assert!(told(r"SHOW TABLES LIKE 'it''s \'%'").is_some());
        for reading in [
            "SHOW TABLES LIKE 'a' UNION SELECT v FROM accounts WHERE 'a' = 'a'",
            "SHOW TABLES LIKE (SELECT v FROM accounts)",
            "SHOW TABLES WHERE 1 = (SELECT v FROM accounts)",
            "SHOW TABLES WHERE 1 UNION TABLE accounts",
        ] {
            assert_eq!(told(reading), None, "{reading}");
        }
        assert_eq!(
            told("SHOW TABLE STATUS FROM bank LIKE 'a%'").unwrap(),
            "SELECT TABLE_NAME AS `Name`, TABLE_ROWS AS `Rows` FROM information_schema.tables \
             WHERE TABLE_SCHEMA = 'bank' AND TABLE_NAME LIKE 'a%' ESCAPE '\\' ORDER BY 1"
        );
    }

    #[test]
    fn the_schema_of_the_catalogue_is_shown_as_the_home_s_own() {
        let relation = "information_schema.tables";
        let shown = shown(relation, &["TABLE_SCHEMA", "TABLE_NAME", "TABLE_ROWS"]);
        assert_eq!(
            shown.query_of(relation, Dialect::MariaDb, "orthodrome_catalogue_1").unwrap(),
            "SELECT `TABLE_SCHEMA`, `TABLE_NAME`, `TABLE_ROWS` FROM information_schema.tables WHERE TABLE_SCHEMA = 'bank' \
             UNION ALL SELECT IF(`TABLE_SCHEMA` = 'orthodrome_catalogue_1', 'bank', `TABLE_SCHEMA`) AS `TABLE_SCHEMA`, \
             `TABLE_NAME`, NULL AS `TABLE_ROWS` FROM information_schema.tables WHERE TABLE_SCHEMA = 'orthodrome_catalogue_1'"
        );
        assert_eq!(shown.query_of("information_schema.engines", Dialect::MariaDb, "s"), None);
    }
}
