//! Definitions of tables as a source describes them, and the SQL that creates an equal, empty table
//! at a source of either kind.

use orthodrome_core::ordered::OrdSet;

use super::catalog::Dialect;
use super::schema::{self, type_name};
use super::system::quote;

/// The definition of a table.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Shape {
    /// Its name.
    pub name: String,
    /// Its columns in order.
    pub columns: Vec<ShapeColumn>,
    /// Its primary key, unique keys and indexes.
    pub keys: Vec<ShapeKey>,
    /// Its foreign keys.
    pub references: Vec<Reference>,
    /// Further constraints, in words of its source: `CONSTRAINT x CHECK (…)`.
    pub constraints: Vec<String>,
    /// The statement that creates it, if its source has one.
    pub statement: Option<String>,
}

/// A column of a table.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ShapeColumn {
    /// Its name.
    pub name: String,
    /// Its type, in words of its source.
    pub type_name: String,
    /// Whether it may be NULL.
    pub is_nullable: bool,
    /// Its default, in words of its source.
    pub default: Option<String>,
    /// Whether its values are generated keys.
    pub is_generated: bool,
    /// What follows the type, in words of its source: an identity, an expression, a collation.
    pub words: String,
}

/// A key or an index.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ShapeKey {
    /// Its name.
    pub name: String,
    /// Whether it is the primary key.
    pub is_primary: bool,
    /// Whether no two rows have the same values.
    pub is_unique: bool,
    /// Its columns; empty if it is one of expressions.
    pub columns: Vec<String>,
    /// The clause of CREATE TABLE or the statement that makes it, in words of its source.
    pub text: String,
}

impl Shape {
    /// The unique keys that no source can check for all rows, if rows are placed by this column:
    /// two rows with equal values may be at two sources. Keys that are generated are unique all
    /// the same, because the proxies give them out.
    #[must_use]
    pub fn keys_of_parts(&self, column: &str) -> Vec<&ShapeKey> {
        let is_generated = |key: &ShapeKey| {
            let [only] = key.columns.as_slice() else { return false };
            self.columns.iter().any(|column| column.name == *only && column.is_generated)
        };
        let contains =
            |key: &ShapeKey| key.columns.iter().any(|name| name.eq_ignore_ascii_case(column));
        let keys = self.keys.iter().filter(|key| key.is_unique);
        keys.filter(|key| !contains(key) && !is_generated(key)).collect()
    }
}

/// A foreign key.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Reference {
    /// Its name.
    pub name: String,
    /// The columns that refer to others.
    pub columns: Vec<String>,
    /// The table that they refer to.
    pub table: String,
    /// The columns that they refer to.
    pub its_columns: Vec<String>,
    /// What happens after a change: `ON DELETE CASCADE`.
    pub rules: String,
}

/// A VARCHAR of MariaDB is shorter, in characters of four bytes.
const VARCHAR_OVER: u32 = 16_384;

/// A CHAR of MariaDB is shorter, in characters.
const CHAR_OVER: u32 = 256;

/// The length of an index over a text of any length in MariaDB, in characters.
const PREFIX: usize = 191;

/// Longest row of MariaDB without texts of any length, in bytes; some are left for its other columns.
const ROW_MAX: u32 = 60_000;

/// Longest key of MariaDB, in bytes.
const KEY_MAX: usize = 3_072;

impl Shape {
    /// The statements that create the table in a schema of a source of kind `to`, without its
    /// foreign keys. `taken` are the names of the schema's relations.
    #[must_use]
    pub fn create(
        &self,
        schema: &str,
        from: Dialect,
        to: Dialect,
        taken: &mut OrdSet<String>,
    ) -> Vec<String> {
        if let (true, Some(statement)) = (from == to, &self.statement) {
            return vec![statement.clone()];
        }
        let types = self.types(to);
        let mut parts = Vec::new();
        for (column, translated) in self.columns.iter().zip(&types) {
            parts.push(if from == to {
                own_column(column, to)
            } else {
                self.column(column, translated, to)
            });
        }
        let mut after = Vec::new();
        for key in &self.keys {
            let made = if from == to {
                self.own_key(key, to, taken)
            } else {
                self.key(schema, key, to, &types, taken)
            };
            if made.starts_with("CREATE") {
                after.push(made);
            } else if !made.is_empty() {
                parts.push(made);
            }
        }
        if from == to {
            parts.extend(self.constraints.iter().cloned());
        }
        let name = qualified(schema, &self.name, to);
        after.insert(0, format!("CREATE TABLE {name} ({})", parts.join(", ")));
        after
    }

    /// The statements that add the foreign keys to tables that `table` finds, as far as the source
    /// can have them. `taken` are the names of the schema's foreign keys.
    #[must_use]
    pub fn refer<'a>(
        &self,
        schema: &str,
        from: Dialect,
        to: Dialect,
        table: impl Fn(&str) -> Option<&'a Self>,
        taken: &mut OrdSet<String>,
    ) -> Vec<String> {
        let list = |names: &[String]| {
            names.iter().map(|name| quote(name, to)).collect::<Vec<_>>().join(", ")
        };
        let mut made = Vec::new();
        for it in &self.references {
            if !table(&it.table).is_some_and(|table| self.can_refer(it, table, from, to)) {
                continue;
            }
            // Foreign keys of MariaDB share the names of their database, PostgreSQL's those of their
            // table.
            let mut name = it.name.clone();
            if to == Dialect::MariaDb && !taken.insert(name.clone()) {
                name = format!("{}_{}", self.name, it.name);
                taken.insert(name.clone());
            }
            let rules = if from == to { &it.rules } else { rules_of(&it.rules) };
            made.push(format!(
                "ALTER TABLE {} ADD CONSTRAINT {} FOREIGN KEY ({}) REFERENCES {} ({}){rules}",
                qualified(schema, &self.name, to),
                quote(&name, to),
                list(&it.columns),
                qualified(schema, &it.table, to),
                list(&it.its_columns),
            ));
        }
        made
    }

    /// Whether a source of kind `to` accepts a foreign key to this table.
    fn can_refer(&self, it: &Reference, table: &Self, from: Dialect, to: Dialect) -> bool {
        let is_key = |key: &ShapeKey| match to {
            Dialect::PostgreSql => {
                let set = |names: &[String]| names.iter().cloned().collect::<OrdSet<_>>();
                key.is_unique && set(&key.columns) == set(&it.its_columns)
            }
            Dialect::MariaDb => key.columns.starts_with(&it.its_columns),
        };
        if it.its_columns.is_empty() || !table.keys.iter().any(is_key) {
            return false;
        }
        if from == to {
            return true;
        }
        let of = |shape: &Self, name: &String| {
            let mut all = shape.columns.iter().zip(shape.types(to));
            all.find(|(column, _)| column.name == *name)
                .map(|(column, it)| (column.is_nullable, it))
        };
        it.columns.iter().zip(&it.its_columns).all(|(own, its)| {
            let (Some((is_nullable, own)), Some((_, its))) = (of(self, own), of(table, its)) else {
                return false;
            };
            // MariaDB has no foreign keys of such texts, and sets no default after a change.
            let is_possible = match to {
                Dialect::PostgreSql => true,
                Dialect::MariaDb => {
                    !is_long(&own)
                        && !it.rules.contains("SET DEFAULT")
                        && (is_nullable || !it.rules.contains("SET NULL"))
                }
            };
            own == its && is_possible
        })
    }

    /// The columns' types in words of a source of kind `to`. In MariaDB a row has a longest length,
    /// so the longest columns of a longer one are texts of any length.
    fn types(&self, to: Dialect) -> Vec<String> {
        let mut types: Vec<String> =
            self.columns.iter().map(|column| type_in(&column.type_name, to)).collect();
        if to == Dialect::PostgreSql {
            return types;
        }
        while types.iter().map(|name| characters(name) * 4).sum::<u32>() > ROW_MAX {
            let Some(longest) = types.iter_mut().max_by_key(|name| characters(name)) else { break };
            "LONGTEXT".clone_into(longest);
        }
        types
    }

    /// A column in words of the other kind of source.
    fn column(&self, column: &ShapeColumn, translated: &str, to: Dialect) -> String {
        let name = quote(&column.name, to);
        let null = if column.is_nullable { "" } else { " NOT NULL" };
        if column.is_generated {
            let generated = match to {
                _ if !is_whole(translated) => "",
                Dialect::PostgreSql => " GENERATED BY DEFAULT AS IDENTITY",
                Dialect::MariaDb if self.counted() != Some(&column.name) => "",
                Dialect::MariaDb => " AUTO_INCREMENT",
            };
            return format!("{name} {translated}{null}{generated}");
        }
        let default = column.default.as_deref();
        let default = default.and_then(|text| default_in(text, &column.type_name, to, translated));
        let default = default.map(|it| format!(" DEFAULT {it}")).unwrap_or_default();
        // Without a word of NULL some types of MariaDB are not nullable.
        let null = if column.is_nullable && to == Dialect::MariaDb { " NULL" } else { null };
        format!("{name} {translated}{null}{default}")
    }

    /// The column whose values MariaDB generates: a table has one, and a key begins with it.
    fn counted(&self) -> Option<&String> {
        let leads = |column: &ShapeColumn| {
            self.keys.iter().any(|key| key.columns.first() == Some(&column.name))
        };
        let is_it = |column: &&ShapeColumn| {
            column.is_generated
                && is_whole(&type_in(&column.type_name, Dialect::MariaDb))
                && leads(column)
        };
        self.columns.iter().find(is_it).map(|column| &column.name)
    }

    /// A name for a key of this table at PostgreSQL, where keys share the names of tables. At
    /// MariaDB they share those of their table.
    fn free_name(&self, name: &str, taken: &mut OrdSet<String>) -> String {
        if taken.insert(name.to_owned()) {
            return name.to_owned();
        }
        let longer = format!("{}_{name}", self.name);
        taken.insert(longer.clone());
        longer
    }

    /// A key in words of its own source, under a name that no other table's key has.
    fn own_key(&self, key: &ShapeKey, kind: Dialect, taken: &mut OrdSet<String>) -> String {
        let name = self.free_name(&key.name, taken);
        if name == key.name {
            return key.text.clone();
        }
        let name = quote(&name, kind);
        match (key.text.split_once(" INDEX "), key.text.strip_prefix("CONSTRAINT ")) {
            (_, Some(rest)) => {
                let own = quote(&key.name, kind);
                let words = rest.strip_prefix(&own).unwrap_or(rest);
                format!("CONSTRAINT {name}{words}")
            }
            (Some((first, rest)), None) => match rest.split_once(" ON ") {
                Some((_, words)) => format!("{first} INDEX {name} ON {words}"),
                None => key.text.clone(),
            },
            (None, None) => key.text.clone(),
        }
    }

    /// A key in words of the other kind of source; empty if there are none. `types` are those of
    /// the columns.
    fn key(
        &self,
        schema: &str,
        key: &ShapeKey,
        to: Dialect,
        types: &[String],
        taken: &mut OrdSet<String>,
    ) -> String {
        if key.columns.is_empty() {
            return String::new();
        }
        let type_of = |name: &String| {
            let mut all = self.columns.iter().zip(types);
            all.find(|(column, _)| column.name == *name).map_or("", |(_, it)| it.as_str())
        };
        // Four bytes for a character; other types have few.
        let room = KEY_MAX / key.columns.len() / 4;
        let part = |name: &String| {
            let it = type_of(name);
            let is_longer = usize::try_from(characters(it)).is_ok_and(|length| length > room);
            let prefix = if to == Dialect::MariaDb && (is_long(it) || is_longer) {
                format!("({})", PREFIX.min(room))
            } else {
                String::new()
            };
            quote(name, to) + &prefix
        };
        let columns = key.columns.iter().map(part).collect::<Vec<_>>().join(", ");
        if key.is_primary {
            return format!("PRIMARY KEY ({columns})");
        }
        let unique = if key.is_unique { "UNIQUE " } else { "" };
        if to == Dialect::MariaDb {
            return format!("{unique}KEY {} ({columns})", quote(&key.name, to));
        }
        let name = self.free_name(&key.name, taken);
        let (name, table) = (quote(&name, to), qualified(schema, &self.name, to));
        if key.is_unique {
            return format!("CONSTRAINT {name} UNIQUE ({columns})");
        }
        format!("CREATE INDEX {name} ON {table} ({columns})")
    }
}

/// A table's name with its schema.
fn qualified(schema: &str, table: &str, to: Dialect) -> String {
    format!("{}.{}", quote(schema, to), quote(table, to))
}

/// A column in words of its own source.
fn own_column(column: &ShapeColumn, kind: Dialect) -> String {
    let name = quote(&column.name, kind);
    let null = if column.is_nullable { "" } else { " NOT NULL" };
    let default = column.default.as_ref().map(|it| format!(" DEFAULT {it}")).unwrap_or_default();
    format!("{name} {}{}{default}{null}", column.type_name, column.words)
}

/// What happens after a change, in words of both kinds of sources.
fn rules_of(rules: &str) -> &str {
    let ends = [" DEFERRABLE", " NOT VALID"].iter().filter_map(|word| rules.find(word)).min();
    rules.get(..ends.unwrap_or(rules.len())).unwrap_or_default()
}

/// The numbers in parentheses after a type: 10 and 2 of `DECIMAL(10,2)`.
fn numbers_of(name: &str, type_name: &str) -> Option<Vec<i32>> {
    let list = name.strip_prefix(type_name)?.strip_prefix('(')?.strip_suffix(')')?;
    list.split(',').map(|number| number.trim().parse().ok()).collect()
}

/// The longest length of a type of MariaDB, in characters; 0 of other types than VARCHAR and CHAR.
fn characters(name: &str) -> u32 {
    let numbers = numbers_of(name, "VARCHAR").or_else(|| numbers_of(name, "CHAR"));
    numbers.and_then(|list| u32::try_from(*list.first()?).ok()).unwrap_or(0)
}

/// Whether a source generates values of this type.
fn is_whole(name: &str) -> bool {
    matches!(name, "SMALLINT" | "INTEGER" | "INT" | "BIGINT")
}

/// Whether a type of MariaDB has texts or bytes of any length, of which a key has the first.
fn is_long(name: &str) -> bool {
    matches!(name, "LONGTEXT" | "LONGBLOB" | "JSON")
}

/// A type in words of the other kind of source. A type that it does not have, or not of this
/// length, is text there, as its clients get the values.
fn type_in(name: &str, to: Dialect) -> String {
    let text = match to {
        Dialect::MariaDb => "LONGTEXT",
        Dialect::PostgreSql => "TEXT",
    };
    let found = type_name(name, to).unwrap_or_else(|_| text.to_owned());
    if to == Dialect::PostgreSql {
        return found;
    }
    let is_decimal = match numbers_of(&found, "DECIMAL").as_deref() {
        Some([digits]) => *digits <= 65,
        Some([digits, scale]) => (0..=38).contains(scale) && (*scale..=65).contains(digits),
        _ => !found.starts_with("DECIMAL("),
    };
    match characters(&found) {
        _ if !is_decimal => text.to_owned(),
        VARCHAR_OVER.. => text.to_owned(),
        length @ CHAR_OVER.. if found.starts_with("CHAR") => format!("VARCHAR({length})"),
        _ => found,
    }
}

/// A constant in words of a source, without the cast that PostgreSQL adds: `'x'` of
/// `'x'::character varying`. None if more than a cast follows, as in an expression.
fn constant_of(text: &str) -> Option<&str> {
    let text = text.trim();
    let end = if text.starts_with('\'') {
        // Two quotes are one of the constant, and each pair of them is passed over.
        let mut quotes = text.match_indices('\'').map(|(at, _)| at).skip(1).peekable();
        loop {
            let at = quotes.next()?;
            if quotes.next_if_eq(&(at + 1)).is_none() {
                break at + 1;
            }
        }
    } else {
        text.find("::").unwrap_or(text.len())
    };
    let (constant, cast) = text.split_at_checked(end)?;
    let in_type = |c: char| c.is_alphanumeric() || " _\"().,[]".contains(c);
    let is_cast =
        cast.is_empty() || cast.strip_prefix("::").is_some_and(|it| it.chars().all(in_type));
    is_cast.then(|| constant.trim())
}

/// Whether a constant is a number in both kinds of sources; `NaN` and `Infinity` are not.
fn is_number(text: &str) -> bool {
    text.parse::<f64>().is_ok_and(f64::is_finite)
}

/// A default in words of the other kind of source; none if it is an expression, or a constant of a
/// type that the other kind lacks: that kind may read it differently.
fn default_in(text: &str, from_type: &str, to: Dialect, to_type: &str) -> Option<String> {
    let constant = constant_of(text)?;
    let is_known = type_name(from_type, to).is_ok() || from_type.starts_with("enum(");
    let is_text = is_known
        && ["VARCHAR", "CHAR", "TEXT", "LONGTEXT"].iter().any(|name| to_type.starts_with(name));
    let lower = constant.to_lowercase();
    let bare = constant.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\''));
    if let Some(bare) = bare {
        return (!bare.contains('\\') && (is_text || is_number(bare))).then(|| constant.to_owned());
    }
    match lower.as_str() {
        "true" => return Some("1".into()),
        "false" => return Some("0".into()),
        "now()"
        | "current_timestamp"
        | "current_timestamp()"
        | "current_timestamp(6)"
        | "localtimestamp"
            if to_type.starts_with("DATETIME(6)") =>
        {
            return Some("CURRENT_TIMESTAMP(6)".into());
        }
        "current_timestamp" | "current_timestamp()" | "current_timestamp(6)"
            if to_type.starts_with("TIMESTAMP") =>
        {
            return Some("CURRENT_TIMESTAMP".into());
        }
        _ => {}
    }
    is_number(constant).then(|| constant.to_owned())
}

/// A statement of SHOW CREATE TABLE, for the database `schema`, without the counter of its keys.
#[must_use]
pub fn moved(statement: &str, table: &str, schema: &str) -> Option<String> {
    let (head, options) = statement.rsplit_once("\n)")?;
    let (_, columns) = head.split_once('(')?;
    let options: Vec<&str> =
        options.split(' ').filter(|word| !word.starts_with("AUTO_INCREMENT=")).collect();
    let maria = Dialect::MariaDb;
    let name = format!("{}.{}", quote(schema, maria), quote(table, maria));
    Some(format!("CREATE TABLE {name} ({columns}\n){}", options.join(" ")))
}

/// PostgreSQL's name of a generated type: `serial` for `integer`.
#[must_use]
pub fn serial_of(type_name: &str) -> Option<&'static str> {
    schema::serial(type_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(name: &str, type_name: &str) -> ShapeColumn {
        let (name, type_name) = (name.to_owned(), type_name.to_owned());
        ShapeColumn { name, type_name, is_nullable: true, ..ShapeColumn::default() }
    }

    fn key(name: &str, columns: &[&str]) -> ShapeKey {
        let columns = columns.iter().map(|column| (*column).to_owned()).collect();
        ShapeKey { name: name.to_owned(), columns, ..ShapeKey::default() }
    }

    fn of(columns: Vec<ShapeColumn>, keys: Vec<ShapeKey>) -> Shape {
        Shape { name: "t".into(), columns, keys, ..Shape::default() }
    }

    #[test]
    fn a_table_of_postgresql_is_created_at_mariadb() {
        let id = ShapeColumn {
            is_generated: true,
            is_nullable: false,
            default: Some("nextval('t_id_seq'::regclass)".into()),
            ..column("id", "bigint")
        };
        let name = ShapeColumn {
            is_nullable: false,
            default: Some("'it''s'::character varying".into()),
            ..column("name", "character varying(50)")
        };
        let at = ShapeColumn {
            default: Some("now()".into()),
            ..column("at", "timestamp without time zone")
        };
        let odd = ShapeColumn { default: Some("'(1,2)'::point".into()), ..column("odd", "point") };
        let primary = ShapeKey { is_primary: true, is_unique: true, ..key("t_pkey", &["id"]) };
        let unique = ShapeKey { is_unique: true, ..key("t_odd", &["odd", "name"]) };
        let shape = of(vec![id, name, at, odd], vec![primary, unique, key("t_x", &[])]);
        let made = shape.create("s", Dialect::PostgreSql, Dialect::MariaDb, &mut OrdSet::new());
        assert_eq!(
            made,
            [
                "CREATE TABLE `s`.`t` (`id` BIGINT NOT NULL AUTO_INCREMENT, `name` VARCHAR(50) NOT NULL DEFAULT 'it''s', \
                 `at` DATETIME(6) NULL DEFAULT CURRENT_TIMESTAMP(6), `odd` LONGTEXT NULL, PRIMARY KEY (`id`), \
                 UNIQUE KEY `t_odd` (`odd`(191), `name`))"
            ]
        );
    }

    #[test]
    fn a_table_of_mariadb_is_created_at_postgresql() {
        let id = ShapeColumn { is_generated: true, is_nullable: false, ..column("id", "int(11)") };
        let state =
            ShapeColumn { default: Some("'new'".into()), ..column("state", "enum('new','old')") };
        let count =
            ShapeColumn { default: Some("0".into()), ..column("count", "int(10) unsigned") };
        let primary = ShapeKey { is_primary: true, is_unique: true, ..key("PRIMARY", &["id"]) };
        let shape = of(vec![id, state, count], vec![primary, key("t", &["count"])]);
        let mut taken = OrdSet::from(["t".to_owned()]);
        let made = shape.create("s", Dialect::MariaDb, Dialect::PostgreSql, &mut taken);
        assert_eq!(
            made,
            [
                "CREATE TABLE \"s\".\"t\" (\"id\" INTEGER NOT NULL GENERATED BY DEFAULT AS IDENTITY, \
                 \"state\" TEXT DEFAULT 'new', \"count\" BIGINT DEFAULT 0, PRIMARY KEY (\"id\"))",
                "CREATE INDEX \"t_t\" ON \"s\".\"t\" (\"count\")",
            ]
        );
    }

    #[test]
    fn a_statement_of_mariadb_is_moved_to_another_database() {
        let text = "CREATE TABLE `t` (\n  `id` int(11) NOT NULL AUTO_INCREMENT,\n  PRIMARY KEY (`id`)\n) ENGINE=InnoDB AUTO_INCREMENT=7 DEFAULT CHARSET=utf8mb4";
        assert_eq!(
            moved(text, "t", "s").unwrap(),
            "CREATE TABLE `s`.`t` (\n  `id` int(11) NOT NULL AUTO_INCREMENT,\n  PRIMARY KEY (`id`)\n) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4"
        );
    }

    fn reference(table: &str, columns: &[&str], rules: &str) -> Reference {
        let columns: Vec<String> = columns.iter().map(|column| (*column).to_owned()).collect();
        Reference {
            name: format!("to_{table}"),
            its_columns: vec!["id".into()],
            table: table.into(),
            rules: rules.into(),
            columns,
        }
    }

    fn referring(columns: Vec<ShapeColumn>, to: Vec<Reference>) -> Shape {
        Shape { references: to, ..of(columns, Vec::new()) }
    }

    /// A table with the primary key `id`.
    fn keyed(type_name: &str) -> Shape {
        let primary = ShapeKey { is_primary: true, is_unique: true, ..key("t_pkey", &["id"]) };
        Shape { name: "here".into(), ..of(vec![column("id", type_name)], vec![primary]) }
    }

    #[test]
    fn foreign_keys_name_only_tables_that_are_there() {
        let rules = " ON DELETE CASCADE";
        let both = vec![reference("here", &["a"], rules), reference("elsewhere", &["a"], rules)];
        let shape = referring(Vec::new(), both);
        let here = keyed("text");
        let table = |name: &str| (name == "here").then_some(&here);
        let postgres = Dialect::PostgreSql;
        assert_eq!(
            shape.refer("s", postgres, postgres, table, &mut OrdSet::new()),
            [
                "ALTER TABLE \"s\".\"t\" ADD CONSTRAINT \"to_here\" FOREIGN KEY (\"a\") REFERENCES \"s\".\"here\" (\"id\") ON DELETE CASCADE"
            ]
        );
    }

    #[test]
    fn foreign_keys_that_the_other_kind_cannot_have_are_left_out() {
        let (postgres, maria) = (Dialect::PostgreSql, Dialect::MariaDb);
        let count = |from: Dialect, to: Dialect, own: &str, here: &Shape, rules: &str| {
            let shape = referring(vec![column("a", own)], vec![reference("here", &["a"], rules)]);
            shape.refer("s", from, to, |_| Some(here), &mut OrdSet::new()).len()
        };
        assert_eq!(count(postgres, maria, "integer", &keyed("integer"), ""), 1);
        // PostgreSQL compares numbers of different lengths, MariaDB has no such key.
        assert_eq!(count(postgres, maria, "integer", &keyed("bigint"), ""), 0);
        assert_eq!(count(postgres, maria, "text", &keyed("text"), ""), 0);
        assert_eq!(
            count(postgres, maria, "integer", &keyed("integer"), " ON DELETE SET DEFAULT"),
            0
        );
        // MariaDB's foreign keys may refer to an index that is not unique.
        let index = Shape { keys: vec![key("k", &["id"])], ..keyed("int(11)") };
        assert_eq!(count(maria, postgres, "int(11)", &index, ""), 0);
        assert_eq!(count(maria, postgres, "int(11)", &keyed("int(11)"), ""), 1);
    }

    #[test]
    fn foreign_keys_of_two_tables_have_two_names_at_mariadb() {
        let here = keyed("integer");
        let rules = " ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED";
        let shape = referring(vec![column("a", "integer")], vec![reference("here", &["a"], rules)]);
        let mut taken = OrdSet::from(["to_here".to_owned()]);
        let made =
            shape.refer("s", Dialect::PostgreSql, Dialect::MariaDb, |_| Some(&here), &mut taken);
        assert_eq!(
            made,
            [
                "ALTER TABLE `s`.`t` ADD CONSTRAINT `t_to_here` FOREIGN KEY (`a`) REFERENCES `s`.`here` (`id`) ON DELETE CASCADE"
            ]
        );
    }

    #[test]
    fn types_of_lengths_that_mariadb_lacks_are_text() {
        for (name, wanted) in [
            ("character varying(16383)", "VARCHAR(16383)"),
            ("character varying(16384)", "LONGTEXT"),
            ("character(255)", "CHAR(255)"),
            ("character(300)", "VARCHAR(300)"),
            ("numeric(65,38)", "DECIMAL(65,38)"),
            ("numeric(66,2)", "LONGTEXT"),
            ("numeric(50,39)", "LONGTEXT"),
            ("numeric(5,10)", "LONGTEXT"),
            ("numeric(5,-2)", "LONGTEXT"),
            ("numeric", "LONGTEXT"),
            ("geometry", "LONGTEXT"),
        ] {
            assert_eq!(type_in(name, Dialect::MariaDb), wanted, "{name}");
        }
        let row = |length: u32| column("a", &format!("character varying({length})"));
        let types = of(vec![row(5_000), row(9_000), row(8_000)], Vec::new());
        assert_eq!(types.types(Dialect::MariaDb), ["VARCHAR(5000)", "LONGTEXT", "VARCHAR(8000)"]);
    }

    #[test]
    fn keys_fit_in_the_length_of_mariadb_s() {
        let shape = of(
            vec![
                column("a", "character varying(700)"),
                column("b", "jsonb"),
                column("c", "integer"),
            ],
            vec![key("one", &["a"]), key("two", &["a", "c"]), key("json", &["b"])],
        );
        let made = shape.create("s", Dialect::PostgreSql, Dialect::MariaDb, &mut OrdSet::new());
        assert!(
            made[0].ends_with("KEY `one` (`a`), KEY `two` (`a`(191), `c`), KEY `json` (`b`(191)))"),
            "{made:?}"
        );
    }

    #[test]
    fn mariadb_counts_one_column_of_whole_numbers() {
        let counted = |name: &str, type_name: &str| ShapeColumn {
            is_generated: true,
            is_nullable: false,
            ..column(name, type_name)
        };
        let keys = || vec![key("a", &["a"]), key("b", &["b"]), key("c", &["c"])];
        for columns in [
            vec![counted("a", "numeric(20,0)"), counted("c", "bigint")],
            vec![counted("a", "integer"), counted("b", "bigint")],
        ] {
            let made = of(columns, keys()).create(
                "s",
                Dialect::PostgreSql,
                Dialect::MariaDb,
                &mut OrdSet::new(),
            );
            assert_eq!(made[0].matches("AUTO_INCREMENT").count(), 1, "{made:?}");
        }
    }

    #[test]
    fn keys_of_two_tables_have_two_names_at_postgresql() {
        let primary = ShapeKey {
            text: "CONSTRAINT \"k\" PRIMARY KEY (a)".into(),
            is_primary: true,
            ..key("k", &["a"])
        };
        let index =
            ShapeKey { text: "CREATE INDEX i ON t USING btree (a)".into(), ..key("i", &["a"]) };
        let shape = of(vec![column("a", "integer")], vec![primary, index]);
        let mut taken = OrdSet::from(["k".to_owned(), "i".to_owned()]);
        let postgres = Dialect::PostgreSql;
        assert_eq!(
            shape.create("s", postgres, postgres, &mut taken),
            [
                "CREATE TABLE \"s\".\"t\" (\"a\" integer, CONSTRAINT \"t_k\" PRIMARY KEY (a))",
                "CREATE INDEX \"t_i\" ON t USING btree (a)",
            ]
        );
    }

    #[test]
    fn only_constants_are_defaults_of_the_other_kind() {
        let (maria, text) = (Dialect::MariaDb, "LONGTEXT");
        for (default, wanted) in [
            ("'a'::text", Some("'a'")),
            ("'a:: ''b'::character varying(9)", Some("'a:: ''b'")),
            ("('a'::text || 'b'::text)", None),
            ("'a'::text || 'b'::text", None),
            ("'a'::text || 'b'", None),
            ("(1 + 1)", None),
            ("1 + 1", None),
            ("upper('a'::text)", None),
            ("'a\\b'::text", None),
        ] {
            let made = default_in(default, "text", maria, text);
            assert_eq!(made.as_deref(), wanted, "{default}");
        }
        let of_number = |default: &str| default_in(default, "numeric(9,2)", maria, "DECIMAL(9,2)");
        assert_eq!(of_number("'-1'::integer").as_deref(), Some("'-1'"));
        assert_eq!(of_number("1.50").as_deref(), Some("1.50"));
        assert_eq!(of_number("'NaN'::numeric"), None);
        assert_eq!(of_number("'Infinity'::numeric"), None);
    }
}
