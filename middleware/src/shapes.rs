//! Asks a source for the definitions of its tables.

use orthodrome_core::ordered::OrdMap;

use orthodrome_geotp::sql::shape::{Reference, Shape, ShapeColumn, ShapeKey, serial_of};
use orthodrome_geotp::sql::system::quote;
use orthodrome_geotp::sql::{Answer, Dialect};

/// What separates the columns of a key in an answer.
const SEPARATOR: char = '\u{1f}';

/// The queries for all definitions: columns, keys and foreign keys.
pub(crate) fn questions(kind: Dialect) -> String {
    match kind {
        Dialect::PostgreSql => [POSTGRES_COLUMNS, POSTGRES_KEYS, POSTGRES_INDEXES].join(";\n"),
        Dialect::MariaDb => [MARIA_COLUMNS, MARIA_KEYS, MARIA_REFERENCES].join(";\n"),
    }
}

/// Types that users have defined are text: the other source may not have them. For the same reason
/// defaults, checks and indexes are left out that use what users or extensions have defined, and so
/// are collations that not every server has. Servers record on what such things depend, except for
/// what every server has.
const POSTGRES_COLUMNS: &str = "\
    SELECT c.relname, a.attname, CASE WHEN t.typnamespace = 'pg_catalog'::regnamespace \
      THEN format_type(a.atttypid, a.atttypmod) ELSE 'text' END, a.attnotnull::int, \
      CASE WHEN t.typnamespace = 'pg_catalog'::regnamespace AND (e.text LIKE 'nextval(%' OR NOT EXISTS \
        (SELECT 1 FROM pg_catalog.pg_depend x WHERE x.classid = 'pg_catalog.pg_attrdef'::regclass \
          AND x.objid = d.oid AND x.refobjid <> d.adrelid)) THEN e.text END, \
      a.attidentity, a.attgenerated, \
      CASE WHEN a.attcollation <> t.typcollation THEN (SELECT CASE WHEN oid < 12000 \
        AND collname <> 'pg_c_utf8' THEN quote_ident(collname) ELSE quote_ident('C') END \
        FROM pg_catalog.pg_collation WHERE oid = a.attcollation AND (oid < 12000 \
          OR collnamespace = 'pg_catalog'::regnamespace AND collname IN ('C.utf8', 'C.UTF-8'))) END \
    FROM pg_catalog.pg_class c \
    JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped \
    JOIN pg_catalog.pg_type t ON t.oid = a.atttypid \
    LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
    LEFT JOIN LATERAL (SELECT pg_get_expr(d.adbin, d.adrelid) AS text) e ON true \
    WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p', 'f') \
    ORDER BY c.relname, a.attnum";

const POSTGRES_KEYS: &str = "\
    SELECT c.relname, k.conname, k.contype, pg_get_constraintdef(k.oid), \
      (SELECT string_agg(a.attname, chr(31) ORDER BY u.n) FROM unnest(k.conkey) WITH ORDINALITY u(num, n) \
        JOIN pg_catalog.pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = u.num), \
      f.relname, \
      (SELECT string_agg(a.attname, chr(31) ORDER BY u.n) FROM unnest(k.confkey) WITH ORDINALITY u(num, n) \
        JOIN pg_catalog.pg_attribute a ON a.attrelid = k.confrelid AND a.attnum = u.num) \
    FROM pg_catalog.pg_constraint k JOIN pg_catalog.pg_class c ON c.oid = k.conrelid \
    LEFT JOIN pg_catalog.pg_class f ON f.oid = k.confrelid AND f.relnamespace = c.relnamespace \
    WHERE c.relnamespace = current_schema()::regnamespace AND (k.contype IN ('p', 'u', 'f') \
      OR k.contype IN ('c', 'x') AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_depend x \
        WHERE x.refclassid <> 'pg_catalog.pg_class'::regclass \
        AND x.refclassid <> 'pg_catalog.pg_constraint'::regclass AND (x.objid = k.oid \
          AND x.classid = 'pg_catalog.pg_constraint'::regclass OR x.objid = k.conindid \
          AND x.classid = 'pg_catalog.pg_class'::regclass))) \
    ORDER BY c.relname, k.contype = 'p' DESC, k.conname";

/// MariaDB has no indexes that correspond to GIN, GiST and others.
const POSTGRES_INDEXES: &str = "\
    SELECT c.relname, i.relname, x.indisunique::int, \
      replace(replace(pg_get_indexdef(x.indexrelid), ' ON ONLY ', ' ON '), \
        ' ON ' || quote_ident(current_schema()) || '.', ' ON '), \
      CASE WHEN x.indpred IS NULL AND x.indexprs IS NULL AND m.amname IN ('btree', 'hash') THEN \
        (SELECT string_agg(a.attname, chr(31) ORDER BY u.n) FROM unnest(x.indkey) WITH ORDINALITY u(num, n) \
          JOIN pg_catalog.pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = u.num \
          WHERE u.n <= x.indnkeyatts) END \
    FROM pg_catalog.pg_index x JOIN pg_catalog.pg_class c ON c.oid = x.indrelid \
    JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid JOIN pg_catalog.pg_am m ON m.oid = i.relam \
    WHERE c.relnamespace = current_schema()::regnamespace AND NOT EXISTS \
      (SELECT 1 FROM pg_catalog.pg_constraint k WHERE k.conindid = x.indexrelid AND k.contype IN ('p', 'u', 'x')) \
      AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_depend d WHERE d.objid = x.indexrelid \
        AND d.classid = 'pg_catalog.pg_class'::regclass AND d.refclassid <> 'pg_catalog.pg_class'::regclass) \
      AND (m.amname IN ('btree', 'hash') OR NOT EXISTS (SELECT 1 FROM pg_catalog.pg_attribute a \
        JOIN pg_catalog.pg_type t ON t.oid = a.atttypid WHERE a.attrelid = x.indrelid \
        AND a.attnum = ANY (x.indkey) AND t.typnamespace <> 'pg_catalog'::regnamespace)) \
    ORDER BY c.relname, i.relname";

const MARIA_COLUMNS: &str = "\
    SELECT c.table_name, c.column_name, c.column_type, c.is_nullable = 'NO', c.column_default, \
      c.extra LIKE '%auto_increment%' \
    FROM information_schema.columns c JOIN information_schema.tables t \
      ON t.table_schema = c.table_schema AND t.table_name = c.table_name AND t.table_type = 'BASE TABLE' \
    WHERE c.table_schema = database() ORDER BY c.table_name, c.ordinal_position";

const MARIA_KEYS: &str = "\
    SELECT table_name, index_name, non_unique = 0, \
      group_concat(column_name ORDER BY seq_in_index SEPARATOR 0x1f) \
    FROM information_schema.statistics WHERE table_schema = database() AND index_type = 'BTREE' \
    GROUP BY table_name, index_name, non_unique \
    ORDER BY table_name, index_name <> 'PRIMARY', index_name";

const MARIA_REFERENCES: &str = "\
    SELECT k.table_name, k.constraint_name, \
      group_concat(k.column_name ORDER BY k.ordinal_position SEPARATOR 0x1f), k.referenced_table_name, \
      group_concat(k.referenced_column_name ORDER BY k.ordinal_position SEPARATOR 0x1f), \
      max(r.update_rule), max(r.delete_rule) \
    FROM information_schema.key_column_usage k JOIN information_schema.referential_constraints r \
      ON r.constraint_schema = k.constraint_schema AND r.constraint_name = k.constraint_name \
      AND r.table_name = k.table_name \
    WHERE k.table_schema = database() AND k.referenced_table_name IS NOT NULL \
    GROUP BY k.table_name, k.constraint_name, k.referenced_table_name \
    ORDER BY k.table_name, k.constraint_name";

/// A cell of an answer; none if it is NULL.
pub(crate) fn cell(row: &[Option<Vec<u8>>], at: usize) -> Option<String> {
    let cell = row.get(at)?.as_ref()?;
    Some(String::from_utf8_lossy(cell).into_owned())
}

fn list(row: &[Option<Vec<u8>>], at: usize) -> Vec<String> {
    let text = cell(row, at).unwrap_or_default();
    text.split(SEPARATOR).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// The definitions in the answers to [`questions`].
pub(crate) fn shapes(kind: Dialect, answers: &[Answer]) -> OrdMap<String, Shape> {
    let mut shapes: OrdMap<String, Shape> = OrdMap::new();
    let [columns, keys, more] = answers else { return shapes };
    for row in &columns.rows {
        let name = cell(row, 0).unwrap_or_default();
        let shape = shapes.entry(name.clone()).or_default();
        shape.name = name;
        shape.columns.push(match kind {
            Dialect::PostgreSql => postgres_column(row),
            Dialect::MariaDb => maria_column(row),
        });
    }
    for row in &keys.rows {
        let Some(shape) = cell(row, 0).and_then(|name| shapes.get_mut(&name)) else { continue };
        match kind {
            Dialect::PostgreSql => add_constraint(shape, row),
            Dialect::MariaDb => shape.keys.push(maria_key(row)),
        }
    }
    for row in &more.rows {
        let Some(shape) = cell(row, 0).and_then(|name| shapes.get_mut(&name)) else { continue };
        match kind {
            Dialect::PostgreSql => shape.keys.push(ShapeKey {
                name: cell(row, 1).unwrap_or_default(),
                is_primary: false,
                is_unique: cell(row, 2).as_deref() == Some("1"),
                columns: list(row, 4),
                text: cell(row, 3).unwrap_or_default(),
            }),
            Dialect::MariaDb => shape.references.push(maria_reference(row)),
        }
    }
    shapes
}

fn postgres_column(row: &[Option<Vec<u8>>]) -> ShapeColumn {
    let text = |at: usize| cell(row, at).unwrap_or_default();
    let mut type_name = text(2);
    let mut default = cell(row, 4);
    let (identity, generated) = (text(5), text(6));
    let counts = default.as_deref().is_some_and(|default| default.starts_with("nextval("));
    let mut words = cell(row, 7).map(|name| format!(" COLLATE {name}")).unwrap_or_default();
    if counts {
        // The default's sequence is at its source only. The type `serial` makes a sequence and a
        // default of its own, and the other kind of source knows it, too.
        default = None;
        if let Some(serial) = serial_of(&type_name) {
            serial.clone_into(&mut type_name);
        }
    }
    match &*identity {
        "a" => words.push_str(" GENERATED ALWAYS AS IDENTITY"),
        "d" => words.push_str(" GENERATED BY DEFAULT AS IDENTITY"),
        _ => {}
    }
    if generated == "s"
        && let Some(expression) = default.take()
    {
        words.push_str(&format!(" GENERATED ALWAYS AS ({expression}) STORED"));
    }
    ShapeColumn {
        name: text(1),
        type_name,
        is_nullable: text(3) != "1",
        default,
        is_generated: counts || !identity.is_empty(),
        words,
    }
}

fn maria_column(row: &[Option<Vec<u8>>]) -> ShapeColumn {
    let text = |at: usize| cell(row, at).unwrap_or_default();
    ShapeColumn {
        name: text(1),
        type_name: text(2),
        is_nullable: text(3) != "1",
        default: cell(row, 4).filter(|default| !default.eq_ignore_ascii_case("null")),
        is_generated: text(5) == "1",
        words: String::new(),
    }
}

fn add_constraint(shape: &mut Shape, row: &[Option<Vec<u8>>]) {
    let name = cell(row, 1).unwrap_or_default();
    let definition = cell(row, 3).unwrap_or_default();
    let kind = cell(row, 2).unwrap_or_default();
    let text = format!("CONSTRAINT {} {definition}", quote(&name, Dialect::PostgreSql));
    match &*kind {
        "p" | "u" => shape.keys.push(ShapeKey {
            name,
            is_primary: kind == "p",
            is_unique: true,
            columns: list(row, 4),
            text,
        }),
        "f" => shape.references.push(Reference {
            name,
            columns: list(row, 4),
            table: cell(row, 5).unwrap_or_default(),
            its_columns: list(row, 6),
            // `FOREIGN KEY (a) REFERENCES b(id) ON DELETE CASCADE`
            rules: definition
                .rsplit_once(')')
                .map(|(_, rules)| rules.to_owned())
                .unwrap_or_default(),
        }),
        _ => shape.constraints.push(text),
    }
}

fn maria_key(row: &[Option<Vec<u8>>]) -> ShapeKey {
    let name = cell(row, 1).unwrap_or_default();
    ShapeKey {
        is_primary: name == "PRIMARY",
        is_unique: cell(row, 2).as_deref() == Some("1"),
        columns: list(row, 3),
        text: String::new(),
        name,
    }
}

fn maria_reference(row: &[Option<Vec<u8>>]) -> Reference {
    let text = |at: usize| cell(row, at).unwrap_or_default();
    let rule = |when: &str, at: usize| match &*text(at) {
        "" | "RESTRICT" | "NO ACTION" => String::new(),
        rule => format!(" ON {when} {rule}"),
    };
    Reference {
        name: text(1),
        columns: list(row, 2),
        table: text(3),
        its_columns: list(row, 4),
        rules: rule("DELETE", 6) + &rule("UPDATE", 5),
    }
}
