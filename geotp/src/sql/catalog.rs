//! The catalogue: the sources, and the placement of each table's rows.

use std::fmt;

use orthodrome_core::ordered::{OrdMap, OrdSet};

use serde::Deserialize;

use super::value::Key;

/// A data source, by its number in the catalogue: `s0`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SourceId(pub u16);

impl fmt::Display for SourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}", self.0)
    }
}

/// The SQL dialect of a client or a source.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Deserialize)]
pub enum Dialect {
    /// PostgreSQL's.
    #[serde(rename = "postgresql")]
    PostgreSql,
    /// MariaDB's and MySQL's.
    #[serde(rename = "mariadb", alias = "mysql")]
    MariaDb,
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PostgreSql => "PostgreSQL",
            Self::MariaDb => "MariaDB",
        })
    }
}

/// A source in the catalogue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Source {
    /// Its name in the configuration file.
    pub name: String,
    /// Its dialect.
    pub kind: Dialect,
    /// Its region.
    pub region: String,
}

/// The type of a sharding key, so that `5`, `'5'` and a bound parameter mean the same row.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyType {
    /// Whole numbers.
    #[default]
    Integer,
    /// Text, compared byte by byte: the column needs a binary collation.
    Text,
}

/// The placement of a table's rows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Placement {
    /// By the value of a column.
    Sharded(Sharding),
    /// Every listed source has all rows.
    Broadcast(OrdSet<SourceId>),
    /// One source has all rows.
    Single(SourceId),
}

/// Placement of rows by a column.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sharding {
    /// The column, lower case.
    pub column: String,
    /// The type of its values.
    pub key: KeyType,
    /// The source of each value. Tables with equal layouts are co-sharded.
    pub layout: Layout,
}

/// The source of each key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Layout {
    /// By the hash of the key.
    Hash(Vec<SourceId>),
    /// By ranges: each bound is exclusive and ascending, and the last source has the rest.
    Range(Vec<(Key, SourceId)>, SourceId),
    /// By a list of values, and a source for all others, if any.
    List(OrdMap<Key, SourceId>, Option<SourceId>),
}

impl Layout {
    /// The source of a key; none if the list has no such value.
    #[must_use]
    pub fn place(&self, key: &Key) -> Option<SourceId> {
        match self {
            Self::Hash(sources) => {
                let count = sources.len() as u64;
                sources.get((key.hash() % count) as usize).copied()
            }
            Self::Range(bounds, last) => {
                Some(bounds.iter().find(|(bound, _)| key < bound).map_or(*last, |(_, s)| *s))
            }
            Self::List(values, default) => values.get(key).copied().or(*default),
        }
    }

    /// All sources that may hold rows.
    #[must_use]
    pub fn sources(&self) -> OrdSet<SourceId> {
        match self {
            Self::Hash(sources) => sources.iter().copied().collect(),
            Self::Range(bounds, last) => bounds.iter().map(|(_, s)| *s).chain([*last]).collect(),
            Self::List(values, default) => values.values().copied().chain(*default).collect(),
        }
    }

    /// All sources that may hold a key from `low` to `high`, both included.
    #[must_use]
    pub fn between(&self, low: Option<&Key>, high: Option<&Key>) -> OrdSet<SourceId> {
        if low.zip(high).is_some_and(|(low, high)| low > high) {
            return OrdSet::new();
        }
        match self {
            Self::Hash(_) => match (low, high) {
                (Some(Key::Int(low)), Some(Key::Int(high)))
                    if high.checked_sub(*low).is_some_and(|span| span < 64) =>
                {
                    (*low..=*high).filter_map(|key| self.place(&Key::Int(key))).collect()
                }
                _ => self.sources(),
            },
            Self::Range(bounds, last) => {
                let mut found = OrdSet::new();
                let mut from: Option<&Key> = None;
                for (bound, source) in bounds {
                    // This part is [from, bound).
                    if low.is_none_or(|low| low < bound)
                        && high.zip(from).is_none_or(|(high, from)| high >= from)
                    {
                        found.insert(*source);
                    }
                    from = Some(bound);
                }
                if high.zip(from).is_none_or(|(high, from)| high >= from) {
                    found.insert(*last);
                }
                found
            }
            Self::List(values, default) => values
                .iter()
                .filter(|(key, _)| {
                    low.is_none_or(|low| *key >= low) && high.is_none_or(|high| *key <= high)
                })
                .map(|(_, source)| *source)
                .chain(*default)
                .collect(),
        }
    }
}

/// A table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    /// Its name, in lower case, the same at every source.
    pub name: String,
    /// The placement of its rows.
    pub placement: Placement,
    /// The columns that identify a row, in lower case. The hotspot footprint identifies records by
    /// them, and PostgreSQL sources lock missing rows by them (ADR 29). By default the sharding
    /// column.
    pub primary: Vec<String>,
    /// All columns in order, in lower case, if the file lists them: for inserts without a column
    /// list.
    pub columns: Vec<String>,
    /// The column whose values are generated where an INSERT has none, lower case, as far as that is known.
    pub generated: Option<String>,
}

impl Table {
    /// The sharding, if a column decides the placement.
    #[must_use]
    pub const fn sharding(&self) -> Option<&Sharding> {
        match &self.placement {
            Placement::Sharded(sharding) => Some(sharding),
            Placement::Broadcast(_) | Placement::Single(_) => None,
        }
    }

    /// All sources that hold rows of it.
    #[must_use]
    pub fn sources(&self) -> OrdSet<SourceId> {
        match &self.placement {
            Placement::Sharded(sharding) => sharding.layout.sources(),
            Placement::Broadcast(sources) => sources.clone(),
            Placement::Single(source) => [*source].into(),
        }
    }
}

/// The schema that PostgreSQL's tables are in by default.
pub(super) const PUBLIC: &str = "public";

/// Checked sources and tables.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Catalogue {
    sources: Vec<Source>,
    tables: OrdMap<String, Table>,
    /// The names of the database.
    databases: OrdSet<String>,
    /// Names of the schema in addition to `public`.
    schemas: OrdSet<String>,
}

/// An error in a catalogue: the field, the problem, and the remedy.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct CatalogueError(pub String);

/// A source in the configuration file. The settings for connections are read elsewhere.
#[derive(Clone, Debug, Deserialize)]
pub struct SourceEntry {
    /// Its name.
    pub name: String,
    /// Its dialect.
    pub kind: Dialect,
    /// Its region.
    #[serde(default)]
    pub region: String,
}

/// A table in the configuration file: one of `shard`, `broadcast` and `single`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableEntry {
    name: String,
    shard: Option<ShardEntry>,
    broadcast: Option<Vec<String>>,
    single: Option<String>,
    #[serde(default)]
    primary: Vec<String>,
    #[serde(default)]
    columns: Vec<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Method {
    Hash,
    Range,
    List,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShardEntry {
    by: Method,
    column: String,
    #[serde(default, rename = "type")]
    key: KeyType,
    /// For hash: the sources, in an order that must not change.
    #[serde(default)]
    sources: Vec<String>,
    /// For range and list.
    #[serde(default)]
    parts: Vec<PartEntry>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartEntry {
    source: String,
    below: Option<Scalar>,
    #[serde(default)]
    values: Vec<Scalar>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Scalar {
    Int(i64),
    Text(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    sources: Vec<SourceEntry>,
    #[serde(default)]
    tables: Vec<TableEntry>,
}

impl ShardEntry {
    /// A value of the sharding column.
    fn key_of(&self, value: &Scalar) -> Result<Key, String> {
        match (self.key, value) {
            (KeyType::Integer, Scalar::Int(value)) => Ok(Key::Int(i128::from(*value))),
            (KeyType::Text, Scalar::Text(value)) => Ok(Key::Text(value.clone())),
            (KeyType::Integer, Scalar::Text(value)) => Err(format!(
                "shard.parts: `{value}` is not a number; correct it, or set type = \"text\""
            )),
            (KeyType::Text, Scalar::Int(value)) => Err(format!(
                "shard.parts: {value} is not text; quote it, or set type = \"integer\""
            )),
        }
    }
}

impl Catalogue {
    /// Parses a text that has only sources and tables.
    ///
    /// # Errors
    /// The first error.
    pub fn parse(text: &str) -> Result<Self, CatalogueError> {
        let file: File = toml::from_str(text)
            .map_err(|error| CatalogueError(error.message().replace('\n', " ")))?;
        Self::new(&file.sources, &file.tables)
    }

    /// Makes a catalogue from entries of a file.
    ///
    /// # Errors
    /// The first error.
    pub fn new(sources: &[SourceEntry], tables: &[TableEntry]) -> Result<Self, CatalogueError> {
        let bad = |text: String| Err(CatalogueError(text));
        if sources.is_empty() {
            return bad(
                "sources: there are none; add `[[sources]]` with name, kind, address".into()
            );
        }
        let mut catalogue = Self::default();
        for entry in sources {
            if entry.name.is_empty()
                || !entry.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
            {
                return bad(format!(
                    "sources.{}: a name has letters, digits, `-` and `_` only; rename it",
                    entry.name
                ));
            }
            if catalogue.find_source(&entry.name).is_some() {
                return bad(format!("sources.{}: listed twice; use another name", entry.name));
            }
            catalogue.sources.push(Source {
                name: entry.name.clone(),
                kind: entry.kind,
                region: entry.region.clone(),
            });
        }
        for entry in tables {
            let name = entry.name.to_lowercase();
            let placement = catalogue
                .placement(entry)
                .map_err(|text| CatalogueError(format!("tables.{name}.{text}")))?;
            let lower = |list: &[String]| list.iter().map(|c| c.to_lowercase()).collect::<Vec<_>>();
            let mut primary = lower(&entry.primary);
            if primary.is_empty()
                && let Placement::Sharded(sharding) = &placement
            {
                primary.push(sharding.column.clone());
            }
            let columns = lower(&entry.columns);
            let generated = None;
            let table = Table { name: name.clone(), placement, primary, columns, generated };
            if catalogue.tables.insert(name.clone(), table).is_some() {
                return bad(format!("tables.{name}: listed twice; remove one"));
            }
        }
        Ok(catalogue)
    }

    fn named(&self, name: &str) -> Result<SourceId, String> {
        self.find_source(name).ok_or_else(|| {
            let known: Vec<_> = self.sources.iter().map(|s| s.name.as_str()).collect();
            format!("unknown source `{name}`; use one of {}", known.join(", "))
        })
    }

    fn placement(&self, entry: &TableEntry) -> Result<Placement, String> {
        match (&entry.shard, &entry.broadcast, &entry.single) {
            (Some(shard), None, None) => self.sharding(shard).map(Placement::Sharded),
            (None, Some(sources), None) => {
                let found: Result<OrdSet<_>, _> =
                    sources.iter().map(|name| self.named(name)).collect();
                let found = found.map_err(|e| format!("broadcast: {e}"))?;
                if found.is_empty() {
                    return Err(
                        "broadcast: the list is empty; list the sources that have the table".into(),
                    );
                }
                Ok(Placement::Broadcast(found))
            }
            (None, None, Some(source)) => {
                self.named(source).map(Placement::Single).map_err(|e| format!("single: {e}"))
            }
            (None, None, None) => {
                Err("shard: the placement is missing; use `shard`, `broadcast` or `single`".into())
            }
            _ => Err("shard: use only one of `shard`, `broadcast` and `single`".into()),
        }
    }

    fn sharding(&self, shard: &ShardEntry) -> Result<Sharding, String> {
        let layout = match shard.by {
            Method::Hash => self.by_hash(shard)?,
            Method::Range => self.by_range(shard)?,
            Method::List => self.by_list(shard)?,
        };
        if shard.column.is_empty() {
            return Err("shard.column: it is empty; name the column".into());
        }
        Ok(Sharding { column: shard.column.to_lowercase(), key: shard.key, layout })
    }

    fn by_hash(&self, shard: &ShardEntry) -> Result<Layout, String> {
        if !shard.parts.is_empty() {
            return Err("shard.parts: not used with a hash; use `sources`".into());
        }
        let sources: Result<Vec<_>, _> =
            shard.sources.iter().map(|name| self.named(name)).collect();
        let sources = sources.map_err(|e| format!("shard.sources: {e}"))?;
        if sources.is_empty() {
            return Err(
                "shard.sources: the list is empty; list the sources that have the rows".into()
            );
        }
        Ok(Layout::Hash(sources))
    }

    fn by_range(&self, shard: &ShardEntry) -> Result<Layout, String> {
        let Some((last, bounded)) = shard.parts.split_last() else {
            return Err("shard.parts: the list is empty; use [{ below = …, source = … }, …, { source = … }]".into());
        };
        let mut bounds: Vec<(Key, SourceId)> = Vec::new();
        for part in bounded {
            let Some(below) = &part.below else {
                return Err("shard.parts: only the last part has no `below`; add it".into());
            };
            let bound = shard.key_of(below)?;
            if bounds.last().is_some_and(|(before, _)| *before >= bound) {
                return Err(format!(
                    "shard.parts: below = {bound} does not ascend; sort the parts"
                ));
            }
            bounds.push((bound, self.source_of(part)?));
        }
        if last.below.is_some() {
            return Err("shard.parts: the last part has a `below`, so no part has the remaining rows; remove it".into());
        }
        Ok(Layout::Range(bounds, self.source_of(last)?))
    }

    fn by_list(&self, shard: &ShardEntry) -> Result<Layout, String> {
        let mut values = OrdMap::new();
        let mut default = None;
        for part in &shard.parts {
            let source = self.source_of(part)?;
            if part.values.is_empty() && default.replace(source).is_some() {
                return Err(
                    "shard.parts: two parts have no `values`; only one can have the remaining rows"
                        .into(),
                );
            }
            for value in &part.values {
                let value = shard.key_of(value)?;
                if values.insert(value.clone(), source).is_some() {
                    return Err(format!("shard.parts: {value} is listed twice; remove one"));
                }
            }
        }
        if values.is_empty() {
            return Err("shard.parts: no part has `values`; list them".into());
        }
        Ok(Layout::List(values, default))
    }

    fn source_of(&self, part: &PartEntry) -> Result<SourceId, String> {
        self.named(&part.source).map_err(|problem| format!("shard.parts: {problem}"))
    }

    /// The source called `name`.
    #[must_use]
    pub fn find_source(&self, name: &str) -> Option<SourceId> {
        self.sources.iter().position(|s| s.name == name).map(|i| SourceId(i as u16))
    }

    /// A source.
    #[must_use]
    pub fn source(&self, id: SourceId) -> Option<&Source> {
        self.sources.get(usize::from(id.0))
    }

    /// All sources, in order.
    pub fn sources(&self) -> impl Iterator<Item = (SourceId, &Source)> {
        self.sources.iter().enumerate().map(|(i, source)| (SourceId(i as u16), source))
    }

    /// The same with these tables, in the place of those that have their names.
    #[must_use]
    pub fn with(&self, tables: impl IntoIterator<Item = Table>) -> Self {
        let mut all = self.clone();
        all.tables.extend(tables.into_iter().map(|table| (table.name.clone(), table)));
        all
    }

    /// The same with what `other` has of a table.
    #[must_use]
    pub fn without(&self, name: &str, other: &Self) -> Self {
        let mut all = self.clone();
        match other.table(name) {
            Some(table) => drop(all.tables.insert(name.to_owned(), table.clone())),
            None => drop(all.tables.remove(name)),
        }
        all
    }

    /// The same with these names of the database.
    #[must_use]
    pub fn with_databases(&self, databases: OrdSet<String>) -> Self {
        Self { databases, ..self.clone() }
    }

    /// The same with these names of the schema, in addition to `public`.
    #[must_use]
    pub fn with_schemas(&self, schemas: OrdSet<String>) -> Self {
        Self { schemas, ..self.clone() }
    }

    /// Whether this is a name of the database.
    pub(super) fn has_database(&self, name: &str) -> bool {
        self.databases.contains(name)
    }

    /// Whether this is a name of the schema for PostgreSQL clients.
    pub(super) fn has_schema(&self, name: &str) -> bool {
        name == PUBLIC || self.schemas.contains(name)
    }

    /// The table called `name`, in any case.
    #[must_use]
    pub fn table(&self, name: &str) -> Option<&Table> {
        self.tables.get(&name.to_lowercase())
    }

    /// All tables, by name.
    pub fn tables(&self) -> impl Iterator<Item = &Table> {
        self.tables.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_over_all_numbers_is_a_range() {
        let layout = Layout::Hash(vec![SourceId(0), SourceId(1)]);
        let (low, high) = (Key::Int(-i128::MAX), Key::Int(i128::MAX));
        assert_eq!(layout.between(Some(&low), Some(&high)), layout.sources());
        assert_eq!(layout.between(Some(&Key::Int(1)), Some(&Key::Int(1))).len(), 1);
    }
}
