//! System relations in a statement: the tables of `pg_catalog` and `information_schema` that it
//! reads, and the queries that replace them.
//!
//! This works on the words of a statement and not on the parser's tree, because the queries of
//! tools contain more of their server's SQL than the parser knows.

use orthodrome_core::ordered::OrdSet;

use super::Refusal;
use super::catalog::Dialect;
use super::parse::{Lexeme, Scan, in_name};

/// A name in a statement, such as `pg_catalog.pg_class`.
struct Name {
    start: usize,
    end: usize,
    /// Its parts without quotes; lower case where there were none.
    parts: Vec<String>,
    /// The last part as it was written, without quotes.
    last: String,
}

/// Words that may follow a relation and are not its alias.
const NO_ALIASES: [&str; 32] = [
    "where",
    "join",
    "inner",
    "left",
    "right",
    "full",
    "cross",
    "natural",
    "on",
    "using",
    "order",
    "group",
    "having",
    "limit",
    "union",
    "intersect",
    "except",
    "minus",
    "fetch",
    "offset",
    "for",
    "window",
    "tablesample",
    "straight_join",
    "force",
    "ignore",
    "use",
    "lock",
    "procedure",
    "into",
    "partition",
    "returning",
];

/// The names in a statement as it is sent to a source, where a backslash in a constant is no escape.
fn names(text: &str, dialect: Dialect) -> Result<Vec<Name>, Refusal> {
    let mut scan = Scan { text, at: 0, dialect: Dialect::PostgreSql };
    let mut names: Vec<Name> = Vec::new();
    // True if the next part belongs to the last name: a dot comes before it, or no other character.
    let (mut after_dot, mut in_word) = (false, false);
    loop {
        let start = scan.at;
        let Some(lexeme) = scan.next_part()? else { return Ok(names) };
        let slice = text.get(start..scan.at).unwrap_or_default();
        let first = slice.chars().next().unwrap_or(' ');
        let quote = if dialect == Dialect::PostgreSql { '"' } else { '`' };
        let is_part = match lexeme {
            Lexeme::Plain => in_name(first),
            Lexeme::Quoted => first == quote,
            Lexeme::Comment(_) | Lexeme::Semicolon => false,
        };
        if !is_part {
            after_dot = slice == "." && (in_word || !names.is_empty());
            in_word = false;
            continue;
        }
        let is_quoted = first == quote;
        let written = slice.trim_matches(quote);
        let part = if is_quoted { written.to_owned() } else { written.to_lowercase() };
        match names.last_mut() {
            Some(last) if in_word && !is_quoted => {
                last.end = scan.at;
                last.last.push_str(written);
                if let Some(word) = last.parts.last_mut() {
                    word.push_str(&part);
                }
            }
            Some(last) if after_dot && last.end + 1 == start => {
                last.end = scan.at;
                last.parts.push(part);
                written.clone_into(&mut last.last);
            }
            _ => names.push(Name {
                start,
                end: scan.at,
                parts: vec![part],
                last: written.to_owned(),
            }),
        }
        (after_dot, in_word) = (false, !is_quoted);
    }
}

impl Name {
    /// The system relation with this name, as `schema.relation`.
    fn relation(&self, dialect: Dialect) -> Option<String> {
        match self.parts.as_slice() {
            [schema, relation, ..] if schema.eq_ignore_ascii_case("information_schema") => {
                Some(format!("information_schema.{}", relation.to_lowercase()))
            }
            [schema, relation, ..]
                if dialect == Dialect::PostgreSql
                    && schema == "pg_catalog"
                    && relation.starts_with("pg_") =>
            {
                Some(format!("pg_catalog.{relation}"))
            }
            [relation] if dialect == Dialect::PostgreSql && relation.starts_with("pg_") => {
                Some(format!("pg_catalog.{relation}"))
            }
            _ => None,
        }
    }
}

/// The system relations that a statement names, as `schema.relation`; functions may be among them.
///
/// # Errors
/// A quote or comment does not end.
pub fn system_relations(text: &str, dialect: Dialect) -> Result<OrdSet<String>, Refusal> {
    Ok(names(text, dialect)?.iter().filter_map(|name| name.relation(dialect)).collect())
}

/// Replaces system relations by queries; `query_of` has the query that replaces a relation.
///
/// # Errors
/// A quote or comment does not end.
pub fn replace_relations(
    text: &str,
    dialect: Dialect,
    query_of: impl Fn(&str) -> Option<String>,
) -> Result<String, Refusal> {
    let names = names(text, dialect)?;
    let mut out = String::new();
    let mut done = 0;
    for (place, name) in names.iter().enumerate() {
        let written = text.get(name.start..name.end).unwrap_or_default();
        let is_alias =
            place.checked_sub(1).and_then(|before| names.get(before)).is_some_and(|before| {
                let between = text.get(before.end..name.start).unwrap_or_default();
                before.parts == ["as"] && between.trim().is_empty()
            });
        let after = text.get(name.end..).unwrap_or_default().trim_start();
        let is_call = after.starts_with('(');
        let query =
            name.relation(dialect).filter(|_| !is_alias && !is_call).and_then(|r| query_of(&r));
        let Some(query) = query else { continue };
        let (schema, relation) = written.split_once('.').unwrap_or(("", written));
        out.push_str(text.get(done..name.start).unwrap_or_default());
        done = name.end;
        if name.parts.len() > 2 {
            // A column of the relation, which is now known by its last name.
            out.push_str(relation);
            continue;
        }
        let relation = if schema.is_empty() { written } else { relation };
        let next = names.get(place + 1).filter(|next| {
            text.get(name.end..next.start).is_some_and(|between| between.trim().is_empty())
        });
        let has_alias = next.is_some_and(|next| match next.parts.as_slice() {
            [word] => !NO_ALIASES.contains(&word.as_str()),
            _ => false,
        });
        out.push_str(&format!("({query})"));
        if !has_alias {
            out.push_str(&format!(" AS {relation}"));
        }
    }
    out.push_str(text.get(done..).unwrap_or_default());
    Ok(out)
}

/// Gives the names of these tables another schema: `t` and `bank.t` become `schema.t`, and in
/// `t FROM bank` the clause is left out, as `SHOW COLUMNS` of MySQL has it.
///
/// # Errors
/// A quote or comment does not end.
pub fn in_schema(
    text: &str,
    dialect: Dialect,
    schema: &str,
    is_it: impl Fn(&str) -> bool,
) -> Result<String, Refusal> {
    let names = names(text, dialect)?;
    let mut out = String::new();
    let mut done = 0;
    for (place, name) in names.iter().enumerate() {
        // MariaDB distinguishes letters of both cases in names of tables.
        let table = match (name.parts.as_slice(), dialect) {
            ([table] | [_, table], Dialect::PostgreSql) => table,
            ([_] | [_, _], Dialect::MariaDb) => &name.last,
            _ => continue,
        };
        if place == 0 || !is_it(table) {
            continue;
        }
        if name.start < done {
            continue;
        }
        out.push_str(text.get(done..name.start).unwrap_or_default());
        out.push_str(&format!("{}.{}", quote(schema, dialect), quote(table, dialect)));
        done = name.end;
        let clause = (names.get(place + 1), names.get(place + 2));
        if let (Some(from), Some(of)) = clause
            && matches!(from.parts.as_slice(), [word] if word == "from" || word == "in")
            && of.parts.len() == 1
        {
            done = of.end;
        }
    }
    out.push_str(text.get(done..).unwrap_or_default());
    Ok(out)
}

/// What takes the name of a table as a text.
const NAMING: [&str; 6] = [
    "to_regclass(",
    "pg_get_serial_sequence(",
    "pg_relation_size(",
    "pg_table_size(",
    "pg_indexes_size(",
    "pg_total_relation_size(",
];

/// Gives tables that texts name another schema: `'own.t'::regclass` becomes `'schema.t'::regclass`.
///
/// # Errors
/// A quote or comment does not end.
pub fn in_schema_by_text(
    text: &str,
    own: &str,
    schema: &str,
    is_it: impl Fn(&str) -> bool,
) -> Result<String, Refusal> {
    let lower = text.to_ascii_lowercase();
    let mut scan = Scan { text, at: 0, dialect: Dialect::PostgreSql };
    let mut out = String::new();
    loop {
        let start = scan.at;
        let Some(lexeme) = scan.next_part()? else { return Ok(out) };
        let slice = text.get(start..scan.at).unwrap_or_default();
        let constant = match lexeme {
            Lexeme::Quoted => slice.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\'')),
            Lexeme::Plain | Lexeme::Comment(_) | Lexeme::Semicolon => None,
        };
        let Some(constant) = constant else {
            out.push_str(slice);
            continue;
        };
        let before = lower.get(..start).unwrap_or_default().trim_end();
        let after = lower.get(scan.at..).unwrap_or_default().trim_start();
        let cast = after.strip_prefix("::").or_else(|| after.strip_prefix("as "));
        let cast = cast.unwrap_or_default().trim_start();
        let is_name = cast.trim_start_matches("pg_catalog.").starts_with("regclass")
            || NAMING.iter().any(|name| before.ends_with(name));
        match Some(constant).filter(|_| is_name).and_then(name_of_text) {
            Some((of, table)) if of == own && is_it(&table) => {
                let kind = Dialect::PostgreSql;
                let name = format!("{}.{}", quote(schema, kind), quote(&table, kind));
                out.push_str(&format!("'{}'", name.replace('\'', "''")));
            }
            _ => out.push_str(slice),
        }
    }
}

/// The schema and the name of a table in a constant: `public."Table"`.
fn name_of_text(constant: &str) -> Option<(String, String)> {
    let text = constant.replace("''", "'");
    let found = names(&text, Dialect::PostgreSql).ok()?;
    let [name] = found.as_slice() else { return None };
    let [schema, table] = name.parts.as_slice() else { return None };
    (name.start == 0 && name.end == text.len()).then(|| (schema.clone(), table.clone()))
}

/// The numbers of a statement's parameters that are arrays: those in `= ANY ($1)`.
///
/// # Errors
/// A quote or comment does not end.
pub fn array_parameters(text: &str) -> Result<OrdSet<usize>, Refusal> {
    let mut scan = Scan { text, at: 0, dialect: Dialect::PostgreSql };
    let mut words: Vec<String> = Vec::new();
    let mut in_word = false;
    loop {
        let start = scan.at;
        let Some(lexeme) = scan.next_part()? else { break };
        let slice = text.get(start..scan.at).unwrap_or_default();
        let goes_on = |c: char| c.is_alphanumeric() || c == '_' || c == '$';
        match (lexeme, words.last_mut()) {
            (Lexeme::Plain, _) if slice.trim().is_empty() => in_word = false,
            (Lexeme::Plain, Some(word)) if in_word && slice.chars().all(goes_on) => {
                word.push_str(&slice.to_lowercase());
            }
            (Lexeme::Plain, _) => {
                in_word = slice.chars().all(goes_on);
                words.push(slice.to_lowercase());
            }
            (Lexeme::Quoted | Lexeme::Semicolon, _) => {
                in_word = false;
                words.push(";".to_owned());
            }
            (Lexeme::Comment(_), _) => in_word = false,
        }
    }
    let number = |four: &[String]| match four {
        [word, open, parameter, close]
            if matches!(word.as_str(), "any" | "all" | "some") && open == "(" && close == ")" =>
        {
            parameter.strip_prefix('$')?.parse().ok()
        }
        _ => None,
    };
    Ok(words.windows(4).filter_map(number).collect())
}

/// A name in quotes.
#[must_use]
pub fn quote(name: &str, dialect: Dialect) -> String {
    match dialect {
        Dialect::PostgreSql => format!("\"{}\"", name.replace('"', "\"\"")),
        Dialect::MariaDb => format!("`{}`", name.replace('`', "``")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replaced(text: &str, dialect: Dialect) -> String {
        let query = |name: &str| match name {
            "pg_catalog.pg_class" => Some("SELECT 1".to_owned()),
            "information_schema.tables" => Some("SELECT 2".to_owned()),
            _ => None,
        };
        replace_relations(text, dialect, query).unwrap()
    }

    #[test]
    fn a_system_relation_is_replaced_under_its_alias() {
        let postgres = Dialect::PostgreSql;
        for (text, wanted) in [
            (
                "SELECT c.oid FROM pg_catalog.pg_class c WHERE c.relname = 'pg_class'",
                "SELECT c.oid FROM (SELECT 1) c WHERE c.relname = 'pg_class'",
            ),
            (
                "SELECT pg_class.oid FROM pg_class JOIN pg_attribute ON pg_catalog.pg_class.oid = attrelid",
                "SELECT pg_class.oid FROM (SELECT 1) AS pg_class JOIN pg_attribute ON pg_class.oid = attrelid",
            ),
            (
                "SELECT * FROM \"information_schema\".\"tables\", pg_class AS x",
                "SELECT * FROM (SELECT 2) AS \"tables\", (SELECT 1) AS x",
            ),
            (
                "SELECT 'pg_class'::regclass, $$pg_class$$ /* pg_class */ FROM t AS pg_class",
                "SELECT 'pg_class'::regclass, $$pg_class$$ /* pg_class */ FROM t AS pg_class",
            ),
            (
                "SELECT (SELECT count(*) FROM pg_class)",
                "SELECT (SELECT count(*) FROM (SELECT 1) AS pg_class)",
            ),
        ] {
            assert_eq!(replaced(text, postgres), wanted);
        }
        assert_eq!(
            replaced(
                "SELECT table_name FROM INFORMATION_SCHEMA.TABLES WHERE `a`.b = 'pg_class'",
                Dialect::MariaDb
            ),
            "SELECT table_name FROM (SELECT 2) AS TABLES WHERE `a`.b = 'pg_class'"
        );
        assert_eq!(
            replaced("SELECT '\\', 1 FROM information_schema.tables t", Dialect::MariaDb),
            "SELECT '\\', 1 FROM (SELECT 2) t"
        );
    }

    #[test]
    fn relations_are_found_outside_of_constants() {
        let text = "SELECT pg_catalog.format_type(1, 2), 'pg_index' FROM pg_class, information_schema.columns";
        let found = system_relations(text, Dialect::PostgreSql).unwrap();
        let found: Vec<&str> = found.iter().map(String::as_str).collect();
        assert_eq!(found, ["information_schema.columns", "pg_catalog.pg_class"]);
    }

    #[test]
    fn a_table_is_named_in_another_schema() {
        let told =
            |text: &str| in_schema(text, Dialect::MariaDb, "s", |table| table == "t").unwrap();
        assert_eq!(told("DESCRIBE t"), "DESCRIBE `s`.`t`");
        assert_eq!(told("SHOW CREATE TABLE `bank`.`t`"), "SHOW CREATE TABLE `s`.`t`");
        assert_eq!(told("DESCRIBE T"), "DESCRIBE T");
        let of_two = in_schema("DESC bank.twoA", Dialect::MariaDb, "s", |table| table == "twoA");
        assert_eq!(of_two.unwrap(), "DESC `s`.`twoA`");
        assert_eq!(
            told("SHOW FULL COLUMNS FROM t FROM bank LIKE 't'"),
            "SHOW FULL COLUMNS FROM `s`.`t` LIKE 't'"
        );
    }

    #[test]
    fn a_table_that_a_text_names_is_named_in_another_schema() {
        let told = |text: &str| {
            in_schema_by_text(text, "public", "s", |table| table == "t" || table == "T").unwrap()
        };
        for (text, wanted) in [
            ("SELECT 'public.t'::regclass", "SELECT '\"s\".\"t\"'::regclass"),
            ("'\"public\".\"T\"' :: pg_catalog.regclass", "'\"s\".\"T\"' :: pg_catalog.regclass"),
            ("CAST('public.t' AS regclass)", "CAST('\"s\".\"t\"' AS regclass)"),
            ("to_regclass( 'PUBLIC.t')", "to_regclass( '\"s\".\"t\"')"),
            ("SELECT 'public.t', 'public.u'::regclass", "SELECT 'public.t', 'public.u'::regclass"),
            (
                "SELECT 't'::regclass, 'other.t'::regclass",
                "SELECT 't'::regclass, 'other.t'::regclass",
            ),
            ("SELECT '''public.t'::regclass", "SELECT '''public.t'::regclass"),
        ] {
            assert_eq!(told(text), wanted);
        }
        // The work grows with the length of the text: it was an hour for a megabyte of blanks.
        let blanks = " ".repeat(1 << 20);
        assert_eq!(told(&blanks), blanks);
    }

    #[test]
    fn parameters_of_any_are_arrays() {
        for (text, wanted) in [
            ("SELECT 1 FROM t WHERE a = ANY ( $1 ) AND b = $2 OR c <> all($3)", vec![1, 3]),
            ("SELECT 1 FROM t WHERE a = many($1) AND b = ANY($2 || '{}')", vec![]),
            ("SELECT 'ANY($1)' /* ANY($2) */ FROM t WHERE a = any /* x */ ($12)", vec![12]),
        ] {
            assert_eq!(Vec::from_iter(array_parameters(text).unwrap()), wanted, "{text}");
        }
    }
}
