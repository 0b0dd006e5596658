//! Effects of a statement on the session that executes it.

use std::ops::ControlFlow;

use sqlparser::ast::{Expr, LockClause, LockType, Select, Statement, TableFactor, Visitor};

use super::super::catalog::Dialect;
use super::super::route::table_name;
use super::super::walk::walk;

/// Effects of a statement on the session that executes it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Effects {
    /// Functions whose effect or value belongs to one session at one source. No client has such a
    /// session.
    pub of_a_session: Vec<String>,
    /// The first user variable, with its `@`.
    pub user_variable: Option<String>,
    /// True for `SELECT … INTO`, which makes a table, or writes a file or a variable.
    pub has_into: bool,
    /// True if it calls a function that the proxy does not know, and that may change the session.
    pub calls_unknown: bool,
}

impl Effects {
    fn call(&mut self, name: &str) {
        if is_of_a_session(name) {
            self.of_a_session.push(name.to_owned());
        }
        self.calls_unknown |= KNOWN.binary_search(&name).is_err();
    }

    fn name(&mut self, name: &str) {
        if self.user_variable.is_none() && is_user_variable(name) {
            self.user_variable = Some(name.to_lowercase());
        }
    }
}

/// The effects of a statement on its session.
#[must_use]
pub fn effects(statement: &Statement) -> Effects {
    struct Finder(Effects);
    impl Visitor for Finder {
        type Break = ();
        fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<()> {
            match expr {
                Expr::Function(function) => self.0.call(&table_name(&function.name)),
                Expr::Identifier(name) => self.0.name(&name.value),
                Expr::CompoundIdentifier(parts) => {
                    if let Some(first) = parts.first() {
                        self.0.name(&first.value);
                    }
                }
                _ => {}
            }
            ControlFlow::Continue(())
        }
        fn pre_visit_table_factor(&mut self, table: &TableFactor) -> ControlFlow<()> {
            match table {
                TableFactor::Table { name, args: Some(_), .. }
                | TableFactor::Function { name, .. } => self.0.call(&table_name(name)),
                _ => {}
            }
            ControlFlow::Continue(())
        }
        fn pre_visit_select(&mut self, select: &Select) -> ControlFlow<()> {
            self.0.has_into |= select.into.is_some();
            ControlFlow::Continue(())
        }
    }
    let mut finder = Finder(Effects::default());
    let _ = walk(statement, &mut finder);
    finder.0
}

/// The same for a statement that the parser cannot read, from its words.
#[must_use]
pub fn effects_of_words(words: &[String]) -> Effects {
    let first = words.first().map(String::as_str);
    let of_a_session = words.iter().filter(|word| is_of_a_session(word)).cloned().collect();
    // `SHOW GRANTS FOR 'u'@'host'` also contains an `@`.
    let user_variable =
        words.iter().find(|word| is_user_variable(word) && (*word != "@" || first != Some("show")));
    Effects {
        of_a_session,
        user_variable: user_variable.cloned(),
        has_into: matches!(first, Some("select" | "with" | "table"))
            && words.iter().any(|word| word == "into"),
        calls_unknown: true,
    }
}

/// Whether a query locks rows in a way that its server refuses in a read-only transaction. MariaDB
/// permits shared locks there.
#[must_use]
pub fn locks_rows(statement: &Statement, dialect: Dialect) -> bool {
    let Statement::Query(query) = statement else { return false };
    let counts =
        |lock: &LockClause| dialect == Dialect::PostgreSql || lock.lock_type == LockType::Update;
    query.locks.iter().any(counts)
}

fn is_user_variable(name: &str) -> bool {
    name.starts_with('@') && !name.starts_with("@@")
}

fn is_of_a_session(function: &str) -> bool {
    // Drivers call it before they return a connection to a pool. There is nothing to release.
    if function == "pg_advisory_unlock_all" {
        return false;
    }
    const BEGINNINGS: [&str; 4] =
        ["pg_advisory_", "pg_try_advisory_", "pg_replication_origin_", "dblink_"];
    BEGINNINGS.iter().any(|beginning| function.starts_with(beginning))
        || OF_A_SESSION.contains(&function)
}

const OF_A_SESSION: &[&str] = &[
    "currval",
    "found_rows",
    "get_lock",
    "last_insert_id",
    "lastval",
    "pg_export_snapshot",
    "release_lock",
    "row_count",
    "set_config",
    "setseed",
];

/// Functions that do not change their session, sorted by name.
pub(in crate::sql) const KNOWN: &[&str] = &[
    "abs",
    "age",
    "array_agg",
    "array_length",
    "array_position",
    "array_to_string",
    "ascii",
    "avg",
    "bin",
    "bit_and",
    "bit_length",
    "bit_or",
    "bool_and",
    "bool_or",
    "btrim",
    "cast",
    "cbrt",
    "ceil",
    "ceiling",
    "char",
    "char_length",
    "character_length",
    "chr",
    "clock_timestamp",
    "coalesce",
    "col_description",
    "concat",
    "concat_ws",
    "conv",
    "convert",
    "cos",
    "count",
    "cume_dist",
    "curdate",
    "current_catalog",
    "current_database",
    "current_date",
    "current_role",
    "current_schema",
    "current_schemas",
    "current_setting",
    "current_time",
    "current_timestamp",
    "current_user",
    "curtime",
    "database",
    "date",
    "date_add",
    "date_diff",
    "date_format",
    "date_part",
    "date_sub",
    "date_trunc",
    "datediff",
    "day",
    "dayname",
    "dayofmonth",
    "dayofweek",
    "dayofyear",
    "decode",
    "degrees",
    "dense_rank",
    "div",
    "elt",
    "encode",
    "every",
    "exp",
    "extract",
    "field",
    "find_in_set",
    "first_value",
    "floor",
    "format",
    "format_type",
    "from_unixtime",
    "gen_random_uuid",
    "generate_series",
    "get_byte",
    "greatest",
    "group_concat",
    "has_schema_privilege",
    "has_table_privilege",
    "hex",
    "hour",
    "if",
    "ifnull",
    "initcap",
    "instr",
    "isnull",
    "json_agg",
    "json_array",
    "json_array_length",
    "json_arrayagg",
    "json_build_array",
    "json_build_object",
    "json_extract",
    "json_extract_path_text",
    "json_length",
    "json_object",
    "json_object_agg",
    "json_objectagg",
    "json_set",
    "json_type",
    "json_unquote",
    "json_valid",
    "json_value",
    "jsonb_agg",
    "jsonb_array_elements",
    "jsonb_array_length",
    "jsonb_build_array",
    "jsonb_build_object",
    "jsonb_object_agg",
    "jsonb_set",
    "jsonb_typeof",
    "lag",
    "last_day",
    "last_value",
    "lcase",
    "lead",
    "least",
    "left",
    "length",
    "lengthb",
    "ln",
    "localtime",
    "localtimestamp",
    "locate",
    "log",
    "log10",
    "log2",
    "lower",
    "lpad",
    "ltrim",
    "make_date",
    "make_interval",
    "make_timestamp",
    "max",
    "md5",
    "microsecond",
    "mid",
    "min",
    "minute",
    "mod",
    "month",
    "monthname",
    "now",
    "nth_value",
    "ntile",
    "nullif",
    "nvl",
    "obj_description",
    "octet_length",
    "ord",
    "overlay",
    "percent_rank",
    "percentile_cont",
    "percentile_disc",
    "pg_advisory_unlock_all",
    "pg_backend_pid",
    "pg_encoding_to_char",
    "pg_function_is_visible",
    "pg_get_constraintdef",
    "pg_get_expr",
    "pg_get_function_arguments",
    "pg_get_function_result",
    "pg_get_functiondef",
    "pg_get_indexdef",
    "pg_get_serial_sequence",
    "pg_get_statisticsobjdef_columns",
    "pg_get_triggerdef",
    "pg_get_userbyid",
    "pg_get_viewdef",
    "pg_is_in_recovery",
    "pg_opclass_is_visible",
    "pg_relation_is_publishable",
    "pg_relation_size",
    "pg_size_pretty",
    "pg_sleep",
    "pg_table_is_visible",
    "pg_table_size",
    "pg_total_relation_size",
    "pg_type_is_visible",
    "pi",
    "position",
    "pow",
    "power",
    "quarter",
    "quote",
    "quote_ident",
    "quote_literal",
    "radians",
    "rand",
    "random",
    "rank",
    "regexp_match",
    "regexp_matches",
    "regexp_replace",
    "regexp_split_to_table",
    "release_all_locks",
    "repeat",
    "replace",
    "reverse",
    "right",
    "round",
    "row_number",
    "row_to_json",
    "rpad",
    "rtrim",
    "schema",
    "sec_to_time",
    "second",
    "session_user",
    "set_byte",
    "sha1",
    "sha2",
    "sha256",
    "shobj_description",
    "sign",
    "sin",
    "sleep",
    "soundex",
    "space",
    "split_part",
    "sqrt",
    "starts_with",
    "statement_timestamp",
    "std",
    "stddev",
    "stddev_pop",
    "stddev_samp",
    "str_to_date",
    "strcmp",
    "string_agg",
    "string_to_array",
    "strpos",
    "subdate",
    "substr",
    "substring",
    "substring_index",
    "sum",
    "sysdate",
    "system_user",
    "tan",
    "time",
    "time_to_sec",
    "timestamp",
    "timestampadd",
    "timestampdiff",
    "to_base64",
    "to_char",
    "to_date",
    "to_days",
    "to_hex",
    "to_json",
    "to_jsonb",
    "to_number",
    "to_regclass",
    "to_timestamp",
    "transaction_timestamp",
    "translate",
    "trim",
    "trunc",
    "truncate",
    "ucase",
    "unhex",
    "unix_timestamp",
    "unnest",
    "upper",
    "user",
    "utc_date",
    "utc_time",
    "utc_timestamp",
    "uuid",
    "values",
    "var_pop",
    "var_samp",
    "variance",
    "version",
    "week",
    "weekday",
    "width_bucket",
    "year",
    "yearweek",
];
