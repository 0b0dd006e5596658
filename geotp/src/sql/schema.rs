//! Translates definitions of tables to the other kind of source.
//!
//! Clauses about storage (`ENGINE`, `fillfactor`, character sets) depend on the kind of source and
//! are left out.

use sqlparser::ast::{
    AlterColumnOperation, AlterIndexOperation, AlterTableOperation, ColumnDef, ColumnOption,
    ColumnOptionDef, CreateTable, CreateTableOptions, DataType, Expr, GeneratedAs, Ident,
    IndexColumn, ObjectName, ObjectNamePart, ObjectType, RenameTableNameKind, SqlOption, Statement,
    TableConstraint,
};

use super::Refusal;
use super::catalog::Dialect;

/// MariaDB's collation that compares texts as PostgreSQL's `C` does: byte by byte, with the spaces at
/// their end.
pub(super) const BYTES_AT_MARIADB: &str = "utf8mb4_nopad_bin";

/// PostgreSQL's collation that compares texts byte by byte, if its source has none that also knows
/// letters beyond ASCII.
pub(super) const BYTES_AT_POSTGRESQL: &str = "C";

/// The query for a PostgreSQL source's collation that compares texts byte by byte, and whose letters
/// beyond ASCII have an upper and a lower case. From PostgreSQL 17 on the server itself has one.
pub const BYTES_QUESTION: &str = "SELECT collname FROM pg_catalog.pg_collation \
    WHERE collnamespace = 'pg_catalog'::regnamespace \
    AND collname IN ('pg_c_utf8', 'C.utf8', 'C.UTF-8') \
    AND collencoding IN (-1, pg_catalog.pg_char_to_encoding(pg_catalog.getdatabaseencoding())) \
    ORDER BY collname DESC LIMIT 1";

/// The table whose columns a statement defines, by CREATE TABLE or ALTER TABLE.
#[must_use]
pub fn defined_table(statement: &Statement) -> Option<String> {
    defined_name(statement).map(super::route::table_name)
}

pub(super) const fn defined_name(statement: &Statement) -> Option<&ObjectName> {
    match statement {
        Statement::CreateTable(create) => Some(&create.name),
        Statement::AlterTable(alter) => Some(&alter.name),
        _ => None,
    }
}

/// Lets a source of new columns treat their values as the other sources of the table do. `is_mixed`
/// says that these are of both kinds, and `collation` is PostgreSQL's collation of bytes.
pub(super) fn align(statement: &mut Statement, to: Dialect, is_mixed: bool, collation: &str) {
    match statement {
        Statement::CreateTable(create) if create.like.is_none() && create.query.is_none() => {
            if is_mixed {
                create.columns.iter_mut().for_each(|column| common_type(column, to));
            }
            compare_bytes(create, to, collation);
        }
        Statement::AlterTable(alter) => {
            for operation in &mut alter.operations {
                if let AlterTableOperation::AddColumn { column_def, .. } = operation {
                    if is_mixed {
                        common_type(column_def, to);
                    }
                    collate(column_def, to, collation);
                }
            }
        }
        _ => {}
    }
}

/// Replaces types whose values the two kinds of sources read or compare differently: only PostgreSQL
/// pads `char(5)` with spaces, and MariaDB writes numbers of single precision with six digits.
fn common_type(column: &mut ColumnDef, to: Dialect) {
    let text = column.data_type.to_string().to_uppercase();
    let (base, size) = match text.split_once('(') {
        Some((base, rest)) => (base.trim(), rest.trim_end_matches(')').trim()),
        None => (text.trim(), ""),
    };
    if !size.bytes().all(|byte| byte.is_ascii_digit()) {
        return;
    }
    let digits = size.parse::<u32>().unwrap_or(0);
    let name = match (to, base) {
        (_, "CHAR" | "CHARACTER") => format!("VARCHAR({})", digits.max(1)),
        (Dialect::PostgreSql, "REAL" | "FLOAT4") => "DOUBLE PRECISION".into(),
        (Dialect::PostgreSql, "FLOAT") if digits > 0 => "DOUBLE PRECISION".into(),
        (Dialect::MariaDb, "FLOAT") => "DOUBLE".into(),
        _ => return,
    };
    let name = ObjectName(vec![ObjectNamePart::Identifier(Ident::new(name))]);
    column.data_type = DataType::Custom(name, Vec::new());
}

/// Gives a column of text the collation of bytes, unless the client names another one.
fn collate(column: &mut ColumnDef, to: Dialect, collation: &str) {
    let has_own = |option: &ColumnOptionDef| {
        matches!(option.option, ColumnOption::Collation(_) | ColumnOption::CharacterSet(_))
    };
    if !is_text(&column.data_type) || column.options.iter().any(has_own) {
        return;
    }
    let name = match to {
        Dialect::PostgreSql => Ident::with_quote('"', collation),
        Dialect::MariaDb => Ident::new(BYTES_AT_MARIADB),
    };
    let option = ColumnOption::Collation(ObjectName::from(vec![name]));
    column.options.insert(0, ColumnOptionDef { name: None, option });
}

/// Lets a source of a new table compare its texts byte by byte, as its other sources do. Otherwise a
/// text would be equal to another one, or above it, only at some of them. Collations that the client
/// names stay.
fn compare_bytes(create: &mut CreateTable, to: Dialect, collation: &str) {
    match to {
        Dialect::PostgreSql => {
            create.columns.iter_mut().for_each(|column| collate(column, to, collation));
        }
        Dialect::MariaDb => {
            let mut options = match std::mem::take(&mut create.table_options) {
                CreateTableOptions::Plain(options) => options,
                _ => Vec::new(),
            };
            let names = |option: &SqlOption| match option {
                SqlOption::KeyValue { key, .. } => key.value.to_lowercase(),
                _ => String::new(),
            };
            let has_own = |option: &SqlOption| {
                let name = names(option);
                ["charset", "character set", "collate"].iter().any(|word| name.ends_with(word))
            };
            if !options.iter().any(has_own) {
                options.push(SqlOption::KeyValue {
                    key: Ident::new("COLLATE"),
                    value: Expr::Identifier(Ident::new(BYTES_AT_MARIADB)),
                });
            }
            create.table_options = CreateTableOptions::Plain(options);
        }
    }
}

/// Whether PostgreSQL compares values of a type by a collation.
fn is_text(of: &DataType) -> bool {
    let text = of.to_string().to_lowercase();
    let plain = text.split('(').next().unwrap_or_default().trim();
    let words = [
        "char",
        "character",
        "char varying",
        "character varying",
        "bpchar",
        "varchar",
        "nvarchar",
        "text",
        "tinytext",
        "mediumtext",
        "longtext",
    ];
    words.contains(&plain)
}

/// Translates a change of the schema to `to`, which is not its client's dialect.
pub(super) fn translate(statement: &mut Statement, to: Dialect) -> Result<(), Refusal> {
    match statement {
        Statement::CreateTable(create) => {
            create.table_options = CreateTableOptions::None;
            create.comment = None;
            create.unlogged = false;
            let keyless = |column: &&ColumnDef| is_generated(column) && !leads_key(create, column);
            if to == Dialect::MariaDb
                && let Some(column) = create.columns.iter().find(keyless)
            {
                return Err(Refusal::unsupported(format!(
                    "MariaDB generates values of a column only if a key begins with it; make \"{}\" a key",
                    column.name.value
                )));
            }
            create.columns.iter_mut().try_for_each(|column| definition(column, to))?;
            let is_index = |constraint: &TableConstraint| {
                matches!(
                    constraint,
                    TableConstraint::Index(_) | TableConstraint::FulltextOrSpatial(_)
                )
            };
            if to == Dialect::PostgreSql && create.constraints.iter().any(is_index) {
                return Err(Refusal::unsupported(
                    "PostgreSQL makes no index within CREATE TABLE; use CREATE INDEX",
                ));
            }
        }
        Statement::AlterTable(alter) => {
            for operation in &mut alter.operations {
                if let AlterTableOperation::AddColumn { column_def, .. } = operation {
                    definition(column_def, to)?;
                }
                untranslated(operation, to)?;
            }
        }
        // PostgreSQL's names of indexes are those of a schema.
        Statement::Drop { object_type: ObjectType::Index, table, .. }
            if to == Dialect::PostgreSql =>
        {
            *table = None;
        }
        Statement::CreateIndex(create) if to == Dialect::MariaDb => {
            if create.name.is_none() {
                return Err(Refusal::unsupported("MariaDB needs a name for the index; add one"));
            }
            create.concurrently = false;
        }
        _ => {}
    }
    Ok(())
}

/// Refuses a change of a column that `to` has no words for. MariaDB needs the whole definition of a
/// column to change its type; PostgreSQL changes type, default and NOT NULL apart.
fn untranslated(operation: &AlterTableOperation, to: Dialect) -> Result<(), Refusal> {
    let change = match operation {
        AlterTableOperation::AlterColumn {
            op: AlterColumnOperation::SetDefault { .. } | AlterColumnOperation::DropDefault,
            ..
        } => return Ok(()),
        AlterTableOperation::AlterColumn { op, .. } if to == Dialect::MariaDb => op.to_string(),
        AlterTableOperation::ModifyColumn { .. } if to == Dialect::PostgreSql => "MODIFY".into(),
        AlterTableOperation::ChangeColumn { .. } if to == Dialect::PostgreSql => "CHANGE".into(),
        _ => return Ok(()),
    };
    Err(Refusal::unsupported(format!(
        "{change}: a source of the other kind has the table and no such change; run it at each source, in the \
         words of its kind"
    )))
}

/// A change of one index, in PostgreSQL's words, which do not name its table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IndexChange {
    /// The index, as PostgreSQL compares names.
    pub index: String,
    /// The statement for a PostgreSQL source.
    pub text: String,
    /// Its new name; none to drop it.
    renamed: Option<String>,
    /// True if an index that does not exist is no error.
    pub if_exists: bool,
}

impl IndexChange {
    /// The statement for a MariaDB source, where this table has the index.
    #[must_use]
    pub fn for_mariadb(&self, table: &str) -> String {
        let quoted = |name: &str| format!("`{}`", name.replace('`', "``"));
        let (table, index) = (quoted(table), quoted(&self.index));
        match &self.renamed {
            None => format!("DROP INDEX {index} ON {table}"),
            Some(name) => format!("ALTER TABLE {table} RENAME INDEX {index} TO {}", quoted(name)),
        }
    }
}

/// The changes of indexes by `DROP INDEX` and `ALTER INDEX` of a PostgreSQL client; none for other
/// statements.
#[must_use]
pub fn index_changes(statement: &Statement) -> Option<Vec<IndexChange>> {
    let folded = |name: &ObjectName| {
        let last = name.0.last().and_then(|part| part.as_ident());
        last.map_or_else(String::new, |ident| match ident.quote_style {
            Some(_) => ident.value.clone(),
            None => ident.value.to_lowercase(),
        })
    };
    let text = |statement: &Statement| {
        super::dialect::render(statement, Dialect::PostgreSql, Dialect::PostgreSql)
    };
    match statement {
        Statement::Drop {
            object_type: ObjectType::Index, table: None, names, if_exists, ..
        } => {
            let change = |index: &ObjectName| {
                let mut one = statement.clone();
                if let Statement::Drop { names, .. } = &mut one {
                    *names = vec![index.clone()];
                }
                let (index, text) = (folded(index), text(&one));
                IndexChange { index, text, renamed: None, if_exists: *if_exists }
            };
            Some(names.iter().map(change).collect())
        }
        Statement::AlterIndex {
            name,
            operation: AlterIndexOperation::RenameIndex { index_name },
        } => {
            let (index, renamed) = (folded(name), Some(folded(index_name)));
            let text = text(statement);
            Some(vec![IndexChange { index, text, renamed, if_exists: false }])
        }
        _ => None,
    }
}

/// The statements that replace TRUNCATE within a transaction, because it must be possible to roll
/// it back: for each table, a statement that deletes every row. None for other statements.
///
/// # Errors
/// The TRUNCATE has options that this does not support.
pub fn deletes(statement: &Statement) -> Result<Option<Vec<String>>, Refusal> {
    let Statement::Truncate(truncate) = statement else { return Ok(None) };
    if truncate.cascade.is_some() || truncate.identity.is_some() {
        return Err(Refusal::unsupported(
            "inside a transaction TRUNCATE supports only table names; send it outside of a transaction",
        ));
    }
    let delete = |name: &ObjectName| format!("DELETE FROM {name}");
    Ok(Some(truncate.table_names.iter().map(|target| delete(&target.name)).collect()))
}

/// The table that a statement creates: its name, its columns, and the one whose values are generated.
#[must_use]
pub fn created(statement: &Statement) -> Option<(String, Vec<String>, Option<String>)> {
    let Statement::CreateTable(create) = statement else { return None };
    let name = |column: &ColumnDef| column.name.value.to_lowercase();
    let columns = create.columns.iter().map(name).collect();
    let generated = create.columns.iter().find(|column| is_generated(column)).map(name);
    Some((super::route::table_name(&create.name), columns, generated))
}

/// The old and the new name of a table that a statement renames.
#[must_use]
pub fn renamed(statement: &Statement) -> Option<(String, String)> {
    let Statement::AlterTable(alter) = statement else { return None };
    let new = alter.operations.iter().find_map(|operation| match operation {
        AlterTableOperation::RenameTable {
            table_name: RenameTableNameKind::To(name) | RenameTableNameKind::As(name),
        } => Some(name),
        _ => None,
    });
    let name = super::route::table_name;
    new.map(|new| (name(&alter.name), name(new)))
}

/// Lets clients give values of a column that is always generated: where several sources have its table, the proxy does.
pub fn allow_values(statement: &mut Statement) {
    let Statement::CreateTable(create) = statement else { return };
    for option in create.columns.iter_mut().flat_map(|column| &mut column.options) {
        if let ColumnOption::Generated { generated_as, generation_expr: None, .. } =
            &mut option.option
        {
            *generated_as = GeneratedAs::ByDefault;
        }
    }
}

/// Whether values of a column are generated where an INSERT has none: `serial`, an identity, AUTO_INCREMENT.
fn is_generated(column: &ColumnDef) -> bool {
    let text = column.data_type.to_string().to_uppercase();
    SERIALS.iter().any(|(serial, _)| *serial == text)
        || column.options.iter().any(|option| counts(&option.option))
}

/// Types of PostgreSQL whose values are generated, and what MariaDB calls those of their size.
const SERIALS: [(&str, &str); 6] = [
    ("SERIAL", "INT"),
    ("SERIAL4", "INT"),
    ("BIGSERIAL", "BIGINT"),
    ("SERIAL8", "BIGINT"),
    ("SMALLSERIAL", "SMALLINT"),
    ("SERIAL2", "SMALLINT"),
];

/// Whether a table has a key that begins with this column, which MariaDB wants of one that counts.
fn leads_key(create: &CreateTable, column: &ColumnDef) -> bool {
    let own = |option: &ColumnOption| {
        matches!(option, ColumnOption::PrimaryKey(_) | ColumnOption::Unique(_))
    };
    let leads = |columns: &[IndexColumn]| {
        columns.first().is_some_and(|first| {
            matches!(&first.column.expr, Expr::Identifier(name) if name.value.eq_ignore_ascii_case(&column.name.value))
        })
    };
    let constrains = |constraint: &TableConstraint| match constraint {
        TableConstraint::PrimaryKey(key) => leads(&key.columns),
        TableConstraint::Unique(key) => leads(&key.columns),
        _ => false,
    };
    column.options.iter().any(|option| own(&option.option))
        || create.constraints.iter().any(constrains)
}

fn definition(column: &mut ColumnDef, to: Dialect) -> Result<(), Refusal> {
    let is_counted = is_generated(column);
    if to == Dialect::MariaDb && column.name.quote_style.is_none() {
        // PostgreSQL's clients find it in lower case, at every source.
        column.name.value = column.name.value.to_lowercase();
    }
    let name = column_type(&column.data_type, to)?;
    let name = ObjectName(vec![ObjectNamePart::Identifier(Ident::new(name))]);
    column.data_type = DataType::Custom(name, Vec::new());
    column.options.retain(|option| {
        // The other kind has other collations.
        let is_kept = !matches!(
            option.option,
            ColumnOption::CharacterSet(_) | ColumnOption::Collation(_) | ColumnOption::Comment(_)
        );
        is_kept && !(is_counted && counts(&option.option))
    });
    if is_counted {
        let words = match to {
            Dialect::PostgreSql => "GENERATED BY DEFAULT AS IDENTITY",
            Dialect::MariaDb => "NOT NULL AUTO_INCREMENT",
        };
        // The words follow the type, whose name takes any.
        if let DataType::Custom(ObjectName(parts), _) = &column.data_type
            && let Some(ObjectNamePart::Identifier(name)) = parts.first()
        {
            let name = Ident::new(format!("{} {words}", name.value));
            let name = ObjectName(vec![ObjectNamePart::Identifier(name)]);
            column.data_type = DataType::Custom(name, Vec::new());
        }
        let says_null = |option: &ColumnOption| matches!(option, ColumnOption::NotNull);
        if to == Dialect::MariaDb {
            column.options.retain(|option| !says_null(&option.option));
        }
    }
    Ok(())
}

/// Whether an option says that values are generated.
fn counts(option: &ColumnOption) -> bool {
    match option {
        ColumnOption::DialectSpecific(tokens) => {
            tokens.iter().any(|token| token.to_string().eq_ignore_ascii_case("auto_increment"))
        }
        ColumnOption::Generated { generation_expr, .. } => generation_expr.is_none(),
        ColumnOption::Identity(_) => true,
        _ => false,
    }
}

/// Translates the type of a column to `to`.
fn column_type(data_type: &DataType, to: Dialect) -> Result<String, Refusal> {
    type_name(&data_type.to_string(), to)
}

/// PostgreSQL's name of a type of whole numbers whose values are generated.
pub(super) fn serial(type_name: &str) -> Option<&'static str> {
    match type_name {
        "integer" => Some("serial"),
        "bigint" => Some("bigserial"),
        "smallint" => Some("smallserial"),
        _ => None,
    }
}

/// Translates the name of a type to `to`.
pub(super) fn type_name(written: &str, to: Dialect) -> Result<String, Refusal> {
    let text = written.to_uppercase();
    let (base, rest) = text.split_once('(').unwrap_or((&text, ""));
    let (size, after) = rest.split_once(')').unwrap_or(("", rest));
    let sized =
        |name: &str| if size.is_empty() { name.to_owned() } else { format!("{name}({size})") };
    // `TIMESTAMP(3) WITHOUT TIME ZONE` is `TIMESTAMP WITHOUT TIME ZONE` of three digits.
    let name = [base.trim(), after.trim()].join(" ");
    let unknown = || {
        Refusal::unsupported(format!("{to} has no type {text}; create the table at each source"))
    };
    let found = match (to, name.trim()) {
        (Dialect::MariaDb, "INT" | "INTEGER" | "INT4") => "INT".into(),
        (Dialect::MariaDb, "BIGINT" | "INT8") => "BIGINT".into(),
        (Dialect::MariaDb, "SMALLINT" | "INT2") => "SMALLINT".into(),
        (Dialect::MariaDb, "BOOL" | "BOOLEAN") => "BOOLEAN".into(),
        // MariaDB writes FLOAT with six digits, so it would lose some.
        (Dialect::MariaDb, "REAL" | "FLOAT4" | "DOUBLE PRECISION" | "FLOAT8" | "FLOAT") => {
            "DOUBLE".into()
        }
        (Dialect::MariaDb, "NUMERIC" | "DECIMAL") if !size.is_empty() => sized("DECIMAL"),
        (Dialect::MariaDb, "VARCHAR" | "CHARACTER VARYING") if !size.is_empty() => sized("VARCHAR"),
        (Dialect::MariaDb, "CHAR" | "CHARACTER" | "BPCHAR") => sized("CHAR"),
        (Dialect::MariaDb, "TEXT" | "VARCHAR" | "CHARACTER VARYING") => "LONGTEXT".into(),
        (Dialect::MariaDb, "BYTEA") => "LONGBLOB".into(),
        (Dialect::MariaDb, "DATE") => "DATE".into(),
        (Dialect::MariaDb, "TIME" | "TIME WITHOUT TIME ZONE") => "TIME(6)".into(),
        (Dialect::MariaDb, "TIMESTAMP" | "TIMESTAMP WITHOUT TIME ZONE") => "DATETIME(6)".into(),
        (Dialect::MariaDb, "JSON" | "JSONB") => "JSON".into(),
        (Dialect::MariaDb, "UUID") => "UUID".into(),
        (
            Dialect::PostgreSql,
            "INT" | "INTEGER" | "MEDIUMINT" | "SMALLINT UNSIGNED" | "MEDIUMINT UNSIGNED",
        ) => "INTEGER".into(),
        (Dialect::PostgreSql, "BIGINT" | "INT UNSIGNED" | "INTEGER UNSIGNED") => "BIGINT".into(),
        (Dialect::PostgreSql, "TINYINT" | "SMALLINT" | "TINYINT UNSIGNED") => "SMALLINT".into(),
        (Dialect::PostgreSql, "BIGINT UNSIGNED") => "NUMERIC(20)".into(),
        (Dialect::PostgreSql, "BOOL" | "BOOLEAN") => "SMALLINT".into(),
        (Dialect::PostgreSql, "FLOAT") => "REAL".into(),
        (Dialect::PostgreSql, "DOUBLE" | "DOUBLE PRECISION") => "DOUBLE PRECISION".into(),
        (Dialect::PostgreSql, "NUMERIC" | "DECIMAL" | "DEC") => {
            if size.is_empty() {
                "NUMERIC(10,0)".into()
            } else {
                sized("NUMERIC")
            }
        }
        (Dialect::PostgreSql, "VARCHAR" | "CHARACTER VARYING") => sized("VARCHAR"),
        (Dialect::PostgreSql, "CHAR" | "CHARACTER") => sized("CHAR"),
        (Dialect::PostgreSql, "TINYTEXT" | "TEXT" | "MEDIUMTEXT" | "LONGTEXT") => "TEXT".into(),
        (
            Dialect::PostgreSql,
            "TINYBLOB" | "BLOB" | "MEDIUMBLOB" | "LONGBLOB" | "VARBINARY" | "BINARY",
        ) => "BYTEA".into(),
        (Dialect::PostgreSql, "DATE") => "DATE".into(),
        (Dialect::PostgreSql, "TIME") => sized("TIME"),
        // Without a precision MariaDB keeps whole seconds.
        (Dialect::PostgreSql, "DATETIME" | "TIMESTAMP") => {
            if size.is_empty() {
                "TIMESTAMP(0)".into()
            } else {
                sized("TIMESTAMP")
            }
        }
        (Dialect::PostgreSql, "JSON") => "JSON".into(),
        (Dialect::PostgreSql, "UUID") => "UUID".into(),
        (Dialect::MariaDb, serial) => {
            let known = SERIALS.iter().find(|(name, _)| *name == serial);
            known.map(|(_, name)| (*name).to_owned()).ok_or_else(unknown)?
        }
        _ => return Err(unknown()),
    };
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::catalog::Catalogue;
    use super::super::parse::{Verb, parse};
    use super::super::{Dialect, dialect};

    fn told(text: &str, from: Dialect, to: Dialect) -> String {
        let mut parsed = parse(text, from).unwrap();
        let Verb::Schema(mut statement) = parsed.remove(0).verb else { panic!("{text}") };
        match dialect::translate(&mut statement, from, to, &Catalogue::default()) {
            Ok(()) => dialect::render(&statement, from, to),
            Err(refusal) => refusal.to_string(),
        }
    }

    /// One source would have changed its table before the other one refused the statement.
    #[test]
    fn changes_without_words_at_the_other_kind_are_refused() {
        let to_maria = |change: &str| {
            told(&format!("ALTER TABLE t {change}"), Dialect::PostgreSql, Dialect::MariaDb)
        };
        let to_postgres = |change: &str| {
            told(&format!("ALTER TABLE t {change}"), Dialect::MariaDb, Dialect::PostgreSql)
        };
        for change in ["ALTER COLUMN a TYPE varchar(20)", "ALTER COLUMN a SET NOT NULL"] {
            assert!(to_maria(change).contains("run it at each source"), "{change}");
            let both = format!("ADD COLUMN b int, {change}");
            assert!(to_maria(&both).contains("run it at each source"), "{both}");
        }
        for change in ["MODIFY a varchar(20)", "CHANGE a b varchar(20)"] {
            assert!(to_postgres(change).contains("run it at each source"), "{change}");
        }
        let default = "ALTER COLUMN a SET DEFAULT 3";
        assert_eq!(to_maria(default), format!("ALTER TABLE t {default}"));
        assert_eq!(to_postgres(default), format!("ALTER TABLE t {default}"));
    }

    #[test]
    fn tables_are_made_in_the_other_kinds_words() {
        let to_maria = |text: &str| told(text, Dialect::PostgreSql, Dialect::MariaDb);
        let to_postgres = |text: &str| told(text, Dialect::MariaDb, Dialect::PostgreSql);
        assert_eq!(
            to_maria(
                "create table pgbench_history(tid int,delta int8,mtime timestamp,filler char(22)) with (fillfactor=100)"
            ),
            "CREATE TABLE pgbench_history (tid INT, delta BIGINT, mtime DATETIME(6), filler CHAR(22))"
        );
        assert_eq!(
            to_postgres(
                "CREATE TABLE sbtest1(id INTEGER NOT NULL, k INTEGER DEFAULT '0' NOT NULL, c CHAR(120) DEFAULT '' NOT NULL, u INT(11) UNSIGNED, at DATETIME, PRIMARY KEY (id)) /*! ENGINE = innodb */"
            ),
            "CREATE TABLE sbtest1 (id INTEGER NOT NULL, k INTEGER DEFAULT '0' NOT NULL, c CHAR(120) DEFAULT '' NOT NULL, u BIGINT, at TIMESTAMP(0), PRIMARY KEY (id))"
        );
        assert_eq!(
            to_maria("ALTER TABLE t ADD COLUMN note text"),
            "ALTER TABLE t ADD COLUMN note LONGTEXT"
        );
        assert_eq!(
            to_postgres(
                "CREATE TABLE t (id INT NOT NULL AUTO_INCREMENT, PRIMARY KEY (id)) ENGINE=InnoDB"
            ),
            "CREATE TABLE t (id INTEGER GENERATED BY DEFAULT AS IDENTITY NOT NULL, PRIMARY KEY (id))"
        );
        for serial in
            ["serial PRIMARY KEY", "int NOT NULL GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"]
        {
            let written = format!("CREATE TABLE t (id {serial})");
            assert_eq!(
                to_maria(&written),
                "CREATE TABLE t (id INT NOT NULL AUTO_INCREMENT PRIMARY KEY)"
            );
        }
        assert_eq!(to_postgres("DROP INDEX i ON t"), "DROP INDEX i");
        assert!(to_maria("CREATE TABLE t (id serial)").contains("make \"id\" a key"));
        assert!(to_maria("CREATE TABLE t (a point)").contains("no type POINT"));
        assert!(to_maria("CREATE INDEX ON t (a)").contains("needs a name"));
        assert!(to_postgres("CREATE TABLE t (a INT, KEY k (a))").contains("CREATE INDEX"));
    }
}
