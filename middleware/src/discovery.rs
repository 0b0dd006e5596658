//! Discovers tables at the sources: their columns, which of these are generated, and the source of
//! a table that the proxy's file does not name.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use orthodrome_core::ordered::{OrdMap, OrdSet};

use orthodrome_geotp::sql::ast::Statement;
use orthodrome_geotp::sql::catalog::{Placement, Table};
use orthodrome_geotp::sql::names;
use orthodrome_geotp::sql::{Catalogue, Dialect, SourceId, Verb, unknown_tables};

use super::session::{Session, SqlError};

/// How long the proxy caches a source's description of a table.
pub(crate) const KEPT: Duration = Duration::from_secs(10);

/// Known tables, in addition to those of the proxy's file.
pub(crate) struct Discovered {
    /// The catalogue of the file.
    file: Catalogue,
    now: Mutex<Now>,
}

struct Now {
    /// The catalogue of the file, with the discovered tables.
    all: Arc<Catalogue>,
    found: OrdMap<String, Instant>,
    /// The time of the last change of the schema through this proxy.
    changed: Option<Instant>,
    /// The names of the schema at PostgreSQL sources, and the time of the query for them.
    schemas: Option<(OrdSet<String>, Instant)>,
}

/// A table at one source.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Found {
    columns: Vec<String>,
    generated: Option<String>,
}

impl Discovered {
    pub(crate) fn new(file: Catalogue) -> Self {
        let all = Arc::new(file.clone());
        Self {
            file,
            now: Mutex::new(Now { all, found: OrdMap::new(), changed: None, schemas: None }),
        }
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The current catalogue.
    pub(crate) fn all(&self) -> Arc<Catalogue> {
        self.now().all.clone()
    }

    /// Clears the cache after a change of the schema.
    pub(crate) fn forget(&self) {
        let mut now = self.now();
        let schemas = now.schemas.as_ref().map(|(schemas, _)| schemas.clone());
        now.all = Arc::new(self.file.with_schemas(schemas.unwrap_or_default()));
        now.found.clear();
        now.changed = Some(Instant::now());
    }

    /// The time of the last change of the schema through this proxy.
    pub(crate) fn changed(&self) -> Option<Instant> {
        self.now().changed
    }

    /// Whether the names of the schema are to be asked for.
    fn wants_schemas(&self) -> bool {
        self.now().schemas.as_ref().is_none_or(|(_, since)| since.elapsed() >= KEPT)
    }

    fn learn_schemas(&self, schemas: OrdSet<String>) {
        let mut now = self.now();
        now.all = Arc::new(now.all.with_schemas(schemas.clone()));
        now.schemas = Some((schemas, Instant::now()));
    }

    pub(crate) fn learn(&self, table: Table) {
        let mut now = self.now();
        now.found.insert(table.name.clone(), Instant::now());
        now.all = Arc::new(now.all.with([table]));
    }

    fn unlearn(&self, name: &str) {
        let mut now = self.now();
        if now.found.remove(name).is_some() {
            now.all = Arc::new(now.all.without(name, &self.file));
        }
    }

    /// Whether there is a description of a table, even an old one.
    fn was_known(&self, name: &str) -> bool {
        self.now().found.contains_key(name)
    }

    /// Whether there is a recent description of a table.
    fn is_known(&self, name: &str) -> bool {
        self.now().found.get(name).is_some_and(|since| since.elapsed() < KEPT)
    }
}

/// The form of a default that is a call of `nextval`, function 1574, which may be cast to `integer`
/// or `smallint`. `pg_get_expr` would show its text, but it locks the table, and the client's own
/// transaction may have locked or dropped it.
const NEXT_VALUE: &str =
    r"^\{FUNCEXPR :funcid (1574|(480|714) [^{]*:args \(\{FUNCEXPR :funcid 1574) ";

/// The query for the columns of a table, and for the generated one.
fn question(kind: Dialect, table: &str) -> String {
    match kind {
        Dialect::PostgreSql => {
            let name = table.replace('"', "\"\"").replace('\'', "''");
            format!(
                "SELECT a.attname::text, CASE WHEN a.attidentity <> '' OR d.adbin::text ~ '{NEXT_VALUE}' \
                 THEN 1 ELSE 0 END FROM pg_catalog.pg_attribute a \
                 LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
                 WHERE a.attrelid = to_regclass('\"{name}\"') AND a.attnum > 0 AND NOT a.attisdropped \
                 ORDER BY a.attnum"
            )
        }
        Dialect::MariaDb => {
            let name = table.replace('\'', "''");
            format!(
                "SELECT column_name, extra LIKE '%auto_increment%' FROM information_schema.columns \
                 WHERE table_schema = database() AND table_name = '{name}' ORDER BY ordinal_position"
            )
        }
    }
}

impl Session {
    /// The catalogue, with the tables that this session's transaction has created.
    pub(crate) fn catalogue(&self) -> Arc<Catalogue> {
        let all = self.proxy.discovered.all();
        if self.created.is_empty() {
            return all;
        }
        Arc::new(all.with(self.created.values().cloned()))
    }

    async fn ask_for(&self, at: SourceId, table: &str) -> Result<Option<Found>, SqlError> {
        let kind = self.proxy.catalogue.source(at).map_or(self.client, |source| source.kind);
        let answer = self.ask(at, &question(kind, table), false).await?;
        let text = |cell: &Option<Vec<u8>>| {
            cell.as_ref()
                .map_or_else(String::new, |cell| String::from_utf8_lossy(cell).into_owned())
        };
        let mut found = Found::default();
        for row in &answer.rows {
            let [name, is_generated, ..] = row.as_slice() else { continue };
            let name = text(name).to_lowercase();
            if text(is_generated) == "1" && found.generated.is_none() {
                found.generated = Some(name.clone());
            }
            found.columns.push(name);
        }
        Ok((!found.columns.is_empty()).then_some(found))
    }

    /// Refuses names of tables in a schema or database that the proxy does not show. PostgreSQL
    /// clients may name the schema after that of any PostgreSQL source.
    async fn check_names(&self, statement: &Statement) -> Result<(), SqlError> {
        if !names::has_foreign(&self.catalogue(), statement, self.client) {
            return Ok(());
        }
        if self.client == Dialect::PostgreSql && self.proxy.discovered.wants_schemas() {
            let mut schemas = OrdSet::new();
            for (at, source) in self.proxy.catalogue.sources() {
                if source.kind != Dialect::PostgreSql {
                    continue;
                }
                // The client's own search path is not that of the proxy.
                let answers = self.answers(at, "SELECT current_schema()").await?;
                let cell = answers.first().and_then(|answer| answer.rows.first()?.first()?.clone());
                schemas.extend(cell.and_then(|cell| String::from_utf8(cell).ok()));
            }
            self.proxy.discovered.learn_schemas(schemas);
        }
        names::check(&self.catalogue(), statement, self.client)?;
        Ok(())
    }

    /// Looks for those tables of a statement that the proxy does not know.
    pub(crate) async fn discover(&self, verb: &Verb) -> Result<(), SqlError> {
        let (Verb::Data(statement) | Verb::Schema(statement)) = verb else { return Ok(()) };
        self.check_names(statement).await?;
        for name in unknown_tables(&self.proxy.catalogue, statement) {
            if self.created.contains_key(&name) || self.proxy.discovered.is_known(&name) {
                continue;
            }
            let mut found = OrdMap::new();
            for (at, _) in self.proxy.catalogue.sources() {
                if let Some(one) = self.ask_for(at, &name).await? {
                    found.insert(at, one);
                }
            }
            if found.len() > 1 {
                let names = found.keys().filter_map(|at| self.proxy.catalogue.source(*at));
                let names: Vec<&str> = names.map(|source| source.name.as_str()).collect();
                return Err(SqlError::new(
                    "0A000",
                    format!(
                        "table \"{name}\" is at several sources ({}), and the proxy does not know how its rows are spread; \
                         add it to [[tables]] of the proxy's file",
                        names.join(", ")
                    ),
                ));
            }
            match found.into_iter().next() {
                Some((at, Found { columns, generated })) => {
                    let placement = Placement::Single(at);
                    let primary = Vec::new();
                    self.proxy.discovered.learn(Table {
                        name,
                        placement,
                        primary,
                        columns,
                        generated,
                    });
                }
                None => self.proxy.discovered.unlearn(&name),
            }
        }
        Ok(())
    }

    /// A table with its columns, which its source is asked for.
    pub(crate) async fn with_columns(&self, name: &str) -> Result<Option<Table>, SqlError> {
        if let Some(own) = self.created.get(name) {
            return Ok(Some(own.clone()));
        }
        let all = self.proxy.discovered.all();
        let Some(table) = all.table(name) else { return Ok(None) };
        if self.proxy.discovered.is_known(name) {
            return Ok(Some(table.clone()));
        }
        let mut table = table.clone();
        let sources: OrdSet<SourceId> = table.sources();
        let is_own = |at: &&SourceId| {
            self.proxy.catalogue.source(**at).is_some_and(|s| s.kind == self.client)
        };
        let at = sources.iter().find(is_own).or(sources.first()).copied();
        // If the table does not exist, the statement itself will get that error.
        let asked = match at {
            Some(at) => self.ask_for(at, name).await,
            None => Ok(None),
        };
        let asked = match asked {
            // While the source is unreachable, its earlier description is used.
            Err(gone) if gone.sqlstate == "08006" && self.proxy.discovered.was_known(name) => None,
            other => other?,
        };
        if let Some(found) = asked {
            if let Some(file) = self.proxy.catalogue.table(name) {
                table.columns.clone_from(&file.columns);
            }
            if table.columns.is_empty() {
                table.columns = found.columns;
            }
            table.generated = found.generated;
            self.proxy.discovered.learn(table.clone());
        }
        Ok(Some(table))
    }

    /// The source for a table without a placement.
    pub(crate) fn default_source(&self) -> Option<SourceId> {
        let named = self.proxy.new_tables;
        let mut all = self.proxy.catalogue.sources();
        let own = all.find(|(_, source)| source.kind == self.client).map(|(id, _)| id);
        named.or(own).or_else(|| self.proxy.catalogue.sources().next().map(|(id, _)| id))
    }
}
