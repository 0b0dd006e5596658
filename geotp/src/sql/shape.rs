//! Definitions of tables as a source describes them, and the SQL that creates an equal, empty table
//! at a source of either kind.

use std::collections::BTreeSet;

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

/// Longest VARCHAR of MariaDB with four bytes for each character.
const VARCHAR_MAX: u32 = 16_383;

/// The length of an index over a text of any length in MariaDB, in characters.
const PREFIX: u32 = 191;

impl Shape {
    /// The statements that create the table in a schema of a source of kind `to`, without its
    /// foreign keys. `taken` are the names of the schema's relations.
    #[must_use]
    pub fn create(
        &self,
        schema: &str,
        from: Dialect,
        to: Dialect,
        taken: &mut BTreeSet<String>,
    ) -> Vec<String> {
        if let (true, Some(statement)) = (from == to, &self.statement) {
            return vec![statement.clone()];
        }
        let mut parts: Vec<String> =
            self.columns.iter().map(|column| self.column(column, from, to)).collect();
        let mut after = Vec::new();
        for key in &self.keys {
            let made = if from == to { key.text.clone() } else { self.key(schema, key, to, taken) };
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

    /// The statements that add the foreign keys to tables of which `is_there` is true.
    #[must_use]
    pub fn refer(
        &self,
        schema: &str,
        from: Dialect,
        to: Dialect,
        is_there: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let list = |names: &[String]| {
            names.iter().map(|name| quote(name, to)).collect::<Vec<_>>().join(", ")
        };
        let one = |it: &Reference| {
            let rules = match it.rules.split_once(" DEFERRABLE") {
                Some((rules, _)) if from != to => rules,
                _ => &it.rules,
            };
            format!(
                "ALTER TABLE {} ADD CONSTRAINT {} FOREIGN KEY ({}) REFERENCES {} ({}){}",
                qualified(schema, &self.name, to),
                quote(&it.name, to),
                list(&it.columns),
                qualified(schema, &it.table, to),
                list(&it.its_columns),
                rules
            )
        };
        self.references.iter().filter(|it| is_there(&it.table)).map(one).collect()
    }

    fn column(&self, column: &ShapeColumn, from: Dialect, to: Dialect) -> String {
        let name = quote(&column.name, to);
        let null = if column.is_nullable { "" } else { " NOT NULL" };
        if from == to {
            let default = column.default.as_ref();
            let default = default.map(|it| format!(" DEFAULT {it}")).unwrap_or_default();
            return format!("{name} {}{}{default}{null}", column.type_name, column.words);
        }
        let translated = type_in(&column.type_name, to);
        let is_leading = |key: &ShapeKey| key.columns.first() == Some(&column.name);
        let generated = match to {
            Dialect::PostgreSql if translated.starts_with("NUMERIC") => "",
            Dialect::PostgreSql => " GENERATED BY DEFAULT AS IDENTITY",
            // MariaDB generates values only for the first column of a key.
            Dialect::MariaDb if !self.keys.iter().any(is_leading) => "",
            Dialect::MariaDb => " AUTO_INCREMENT",
        };
        if column.is_generated {
            return format!("{name} {translated}{null}{generated}");
        }
        let default = column.default.as_deref().and_then(|text| default_in(text, &translated));
        let default = default.map(|it| format!(" DEFAULT {it}")).unwrap_or_default();
        // Without a word of NULL some types of MariaDB are not nullable.
        let null = if column.is_nullable && to == Dialect::MariaDb { " NULL" } else { null };
        format!("{name} {translated}{null}{default}")
    }

    /// A key in words of the other kind of source; empty if there are none.
    fn key(
        &self,
        schema: &str,
        key: &ShapeKey,
        to: Dialect,
        taken: &mut BTreeSet<String>,
    ) -> String {
        if key.columns.is_empty() {
            return String::new();
        }
        let part = |name: &String| {
            let column = self.columns.iter().find(|column| column.name == *name);
            let is_long = column.is_some_and(|column| {
                matches!(type_in(&column.type_name, to).as_str(), "LONGTEXT" | "LONGBLOB")
            });
            let prefix = if is_long && to == Dialect::MariaDb {
                format!("({PREFIX})")
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
        // PostgreSQL's indexes share the names of tables, MariaDB's those of their table.
        let mut name = key.name.clone();
        if !taken.insert(name.clone()) {
            name = format!("{}_{}", self.name, key.name);
            taken.insert(name.clone());
        }
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

/// A type in words of the other kind of source. A type that it does not have is text there, as
/// its clients get the values.
fn type_in(name: &str, to: Dialect) -> String {
    let text = match to {
        Dialect::MariaDb => "LONGTEXT",
        Dialect::PostgreSql => "TEXT",
    };
    let found = type_name(name, to).unwrap_or_else(|_| text.to_owned());
    let length = found.strip_prefix("VARCHAR(").and_then(|rest| rest.strip_suffix(')'));
    let length = length.and_then(|length| length.parse::<u32>().ok());
    if to == Dialect::MariaDb && length.is_some_and(|length| length > VARCHAR_MAX) {
        return text.to_owned();
    }
    found
}

/// A default in words of the other kind of source; none if it is an expression.
fn default_in(text: &str, to_type: &str) -> Option<String> {
    // PostgreSQL adds casts: `'x'::character varying`.
    let (constant, _) = text.split_once("::").unwrap_or((text, ""));
    let constant = constant.trim();
    let is_text =
        ["VARCHAR", "CHAR", "TEXT", "LONGTEXT"].iter().any(|name| to_type.starts_with(name));
    let lower = constant.to_lowercase();
    let bare = constant.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\''));
    if let Some(bare) = bare {
        let is_plain = !bare.replace("''", "").contains('\'') && !bare.contains('\\');
        let is_number = bare.parse::<f64>().is_ok();
        return (is_plain && (is_text || is_number)).then(|| constant.to_owned());
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
    constant.parse::<f64>().is_ok().then(|| constant.to_owned())
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
        let made = shape.create("s", Dialect::PostgreSql, Dialect::MariaDb, &mut BTreeSet::new());
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
        let mut taken = BTreeSet::from(["t".to_owned()]);
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

    #[test]
    fn foreign_keys_name_only_tables_that_are_there() {
        let reference = |table: &str| Reference {
            name: format!("to_{table}"),
            columns: vec!["a".into()],
            table: table.into(),
            its_columns: vec!["id".into()],
            rules: " ON DELETE CASCADE".into(),
        };
        let shape = Shape {
            references: vec![reference("here"), reference("elsewhere")],
            ..of(Vec::new(), Vec::new())
        };
        assert_eq!(
            shape.refer("s", Dialect::PostgreSql, Dialect::PostgreSql, |table| table == "here"),
            [
                "ALTER TABLE \"s\".\"t\" ADD CONSTRAINT \"to_here\" FOREIGN KEY (\"a\") REFERENCES \"s\".\"here\" (\"id\") ON DELETE CASCADE"
            ]
        );
    }
}
