//! What is read for a gathered query.

use super::*;

const FILE: &str = r#"
    [[sources]]
    name = "pg"
    kind = "postgresql"
    [[sources]]
    name = "maria"
    kind = "mariadb"
    [[tables]]
    name = "a"
    single = "pg"
    [[tables]]
    name = "b"
    single = "maria"
    [[tables]]
    name = "c"
    single = "pg"
"#;

fn gather(text: &str) -> Option<Gather> {
    let catalogue = Catalogue::parse(FILE).unwrap();
    let parsed = parse(text, Dialect::PostgreSql).unwrap().remove(0);
    let Verb::Data(statement) = parsed.verb else { panic!("{text}") };
    Gather::of(&catalogue, &statement, &[], Dialect::PostgreSql).unwrap()
}

/// Rows with one column.
fn rows(column: &str, kind: Kind, values: &[Option<&str>]) -> Answer {
    let rows = values.iter().map(|value| vec![value.map(|value| value.as_bytes().to_vec())]);
    let columns = vec![Column { name: column.into(), kind, oid: 0 }];
    Answer { columns, rows: rows.collect(), ..Answer::default() }
}

/// The statement of a step, without its beginning and its end.
fn read(step: Step) -> String {
    let Step::Read(table, parsed) = step else { return format!("{step:?}") };
    let Verb::Data(statement) = parsed.verb else { panic!("no query") };
    let text = statement.to_string();
    let text = text.strip_suffix(&format!(" LIMIT {}", ROWS_MAX + 1)).unwrap();
    format!("{table}: {}", text.strip_prefix("SELECT * FROM ").unwrap())
}

fn first_reads(text: &str) -> Vec<String> {
    gather(text).unwrap().statements().map(read).collect()
}

#[test]
fn conditions_restrict_a_read_only_if_every_row_of_the_result_satisfies_them() {
    let all = [
        (
            "SELECT * FROM a JOIN b ON a.x = b.x AND b.y > 1 WHERE a.z = 2",
            ["a: \"a\" WHERE (a.z = 2)", "b: \"b\" WHERE (b.y > 1)"],
        ),
        // Rows of `a` that match nothing are in the result.
        (
            "SELECT * FROM a LEFT JOIN b ON a.x = b.x AND a.y = 1 WHERE b.x IS NULL",
            ["a: \"a\"", "b: \"b\""],
        ),
        ("SELECT * FROM a RIGHT JOIN b ON a.x = b.x WHERE a.z = 2", ["a: \"a\"", "b: \"b\""]),
        ("SELECT * FROM a FULL JOIN b ON a.x = b.x WHERE b.z = 2", ["a: \"a\"", "b: \"b\""]),
        ("SELECT * FROM a, b WHERE a.x = 1 OR b.x = 2", ["a: \"a\"", "b: \"b\""]),
        ("SELECT * FROM a, b WHERE a.x > random() AND y = 1", ["a: \"a\"", "b: \"b\""]),
        ("SELECT * FROM a WHERE a.x = 1 UNION SELECT * FROM b", ["a: \"a\"", "b: \"b\""]),
        (
            "SELECT * FROM a WHERE x = 1 AND EXISTS (SELECT 1 FROM b WHERE b.x = a.x)",
            ["a: \"a\" WHERE (x = 1)", "b: \"b\""],
        ),
        (
            "SELECT * FROM a AS one, b AS \"Two\" WHERE one.x = 1 AND \"Two\".x = 2",
            ["a: \"a\" AS \"one\" WHERE (one.x = 1)", "b: \"b\" AS \"Two\" WHERE (\"Two\".x = 2)"],
        ),
    ];
    for (text, expected) in all {
        assert_eq!(first_reads(text), expected, "{text}");
    }
    // A table that occurs twice is read for both.
    assert_eq!(first_reads("SELECT * FROM a p JOIN a q ON p.x = q.y WHERE p.z = 1"), ["a: \"a\""]);
}

#[test]
fn found_values_restrict_what_is_joined_to_them() {
    let twice = [Some("1"), None, Some("1"), Some("2")];
    let all = [
        ("SELECT * FROM a JOIN b ON a.x = b.y WHERE a.z = 1", "b: \"b\" WHERE (b.y IN (1, 2))"),
        ("SELECT * FROM a, b WHERE b.y = a.x AND a.z = 1", "b: \"b\" WHERE (b.y IN (1, 2))"),
        ("SELECT * FROM a LEFT JOIN b ON a.x = b.y", "b: \"b\" WHERE (b.y IN (1, 2))"),
        // Every row of `b` is in the result.
        ("SELECT * FROM a RIGHT JOIN b ON a.x = b.y", "b: \"b\""),
        ("SELECT * FROM a FULL JOIN b ON a.x = b.y", "b: \"b\""),
        ("SELECT * FROM b LEFT JOIN a ON a.x = b.y", "b: \"b\""),
        ("SELECT * FROM a JOIN b ON a.x < b.y", "b: \"b\""),
        ("SELECT * FROM a JOIN b ON a.x = b.y OR b.z = 1", "b: \"b\""),
    ];
    for (text, expected) in all {
        let found = [("a".to_owned(), rows("x", Kind::Int4, &twice))].into();
        assert_eq!(read(gather(text).unwrap().next(&found)), expected, "{text}");
    }
    let chain = "SELECT * FROM a LEFT JOIN b ON a.x = b.y LEFT JOIN c ON c.k = b.x";
    let found = [
        ("a".to_owned(), rows("x", Kind::Int4, &[Some("1")])),
        ("b".to_owned(), rows("x", Kind::Text, &[Some("it's")])),
    ];
    let next = read(gather(chain).unwrap().next(&found.clone().into()));
    assert_eq!(next, "c: \"c\" WHERE (c.k IN ('it''s'))");
    // Nothing can match no rows, and many values are as good as all.
    let none = [("a".to_owned(), rows("x", Kind::Int4, &[None]))].into();
    assert_eq!(gather(all[0].0).unwrap().next(&none), Step::Skip("b".into()));
    let many: Vec<String> = (0..=VALUES_MAX).map(|n| n.to_string()).collect();
    let many: Vec<Option<&str>> = many.iter().map(|value| Some(value.as_str())).collect();
    let many = [("a".to_owned(), rows("x", Kind::Int4, &many))].into();
    assert_eq!(read(gather(all[0].0).unwrap().next(&many)), "b: \"b\"");
    // Rounding and collations may make values equal that are written differently.
    for kind in [Kind::Float8, Kind::Timestamp, Kind::Json] {
        let found = [("a".to_owned(), rows("x", kind, &twice))].into();
        assert_eq!(read(gather(all[0].0).unwrap().next(&found)), "b: \"b\"", "{kind:?}");
    }
}

#[test]
fn only_queries_of_the_catalogues_tables_are_gathered() {
    for text in [
        "DELETE FROM a",
        "SELECT 1",
        "SELECT * FROM a, pg_catalog.pg_class",
        "SELECT * FROM a, unknown",
        // The name may mean either of them.
        "WITH a AS (SELECT * FROM a) SELECT * FROM a, b",
    ] {
        assert!(gather(text).is_none(), "{text}");
    }
}

#[test]
fn the_result_is_computed_from_the_rows_in_place_of_the_tables() {
    let text = "WITH w AS (SELECT * FROM public.a) SELECT public.a.x FROM w, a, b FOR UPDATE";
    let gather = gather(text).unwrap();
    let locked = gather.statements().next().unwrap();
    let Step::Read(_, parsed) = locked else { panic!("{locked:?}") };
    let Verb::Data(statement) = parsed.verb else { panic!("no query") };
    assert!(statement.to_string().ends_with("FOR UPDATE"), "{statement}");
    let template = |name: &str| Template {
        name: format!("\"s\".\"{name}\""),
        is_copy: true,
        unordered: OrdSet::new(),
        documents: OrdMap::new(),
    };
    let templates: OrdMap<String, Template> =
        ["a", "b"].map(|name| (name.to_owned(), template(name))).into();
    let mut found: OrdMap<String, Answer> =
        [("a".to_owned(), rows("x", Kind::Text, &[Some("o'n\\e\n\""), None]))].into();
    found.insert("b".into(), rows("j", Kind::Json, &[Some("{\"k\": 1}")]));
    assert_eq!(
        gather.result(&found, &templates).unwrap(),
        "WITH \"a\" AS (SELECT * FROM pg_catalog.json_populate_recordset(NULL::\"s\".\"a\", \
         '[{\"x\":\"o''n\\\\e\\u000a\\\"\"},{\"x\":null}]')), \
         \"b\" AS (SELECT * FROM pg_catalog.json_populate_recordset(NULL::\"s\".\"b\", '[{\"j\":{\"k\": 1}}]')), \
         w AS (SELECT * FROM \"a\") SELECT a.x FROM w, \"a\", \"b\""
    );
    // A type that users have defined is only text in a copy.
    found.get_mut("a").unwrap().columns[0].oid = OWN_TYPES;
    let refusal = gather.result(&found, &templates).unwrap_err();
    assert!(refusal.message.contains("column \"x\" of \"a\""), "{refusal}");
}

/// MariaDB has no type of its own for documents, and returns their text.
#[test]
fn documents_are_gathered_as_documents() {
    let template = Template {
        name: "t".into(),
        is_copy: false,
        unordered: OrdSet::new(),
        documents: [("j".to_owned(), "json".to_owned())].into(),
    };
    let written = |kind, name| {
        postgres_rows(&template, Some(&rows(name, kind, &[Some("{\"k\": 1}"), Some("1.10")])))
    };
    for kind in [Kind::Json, Kind::Text] {
        assert!(written(kind, "J").contains(r#"[{"J":{"k": 1}},{"J":1.10}]"#), "{kind:?}");
    }
    assert!(written(Kind::Text, "x").contains(r#"{"x":"1.10"}"#), "a text is a text");
}

#[test]
fn values_for_mariadb_have_the_types_of_their_columns() {
    let constant = |kind, value: &str| {
        let mut text = String::new();
        maria_constant(&mut text, kind, &Some(value.as_bytes().to_vec()));
        text
    };
    assert_eq!(constant(Kind::Int8, "-5"), "-5");
    assert_eq!(constant(Kind::Decimal, "1.50"), "1.50");
    assert_eq!(constant(Kind::Float8, "1.5"), "1.5e0");
    assert_eq!(constant(Kind::Float8, "1e30"), "1e30");
    assert_eq!(constant(Kind::Bool, "t"), "1");
    assert_eq!(constant(Kind::Bool, "0"), "0");
    assert_eq!(constant(Kind::Bytes, "a'"), "X'6127'");
    assert_eq!(constant(Kind::Date, "2024-01-31"), "DATE'2024-01-31'");
    assert_eq!(constant(Kind::Date, "0000-00-00"), "'0000-00-00'");
    assert_eq!(constant(Kind::Timestamp, "2024-01-31 10:00:00"), "TIMESTAMP'2024-01-31 10:00:00'");
    assert_eq!(constant(Kind::Text, "it's \\"), "'it''s \\'");
}

/// `json_populate_recordset` makes NULL of the document `null`, and fails for `\u0000`.
#[test]
fn documents_that_postgresql_would_lose_are_gathered_as_texts() {
    let template = Template {
        name: "t".into(),
        is_copy: false,
        unordered: OrdSet::new(),
        documents: [("j".to_owned(), "jsonb".to_owned())].into(),
    };
    for (document, constant) in
        [("null", r#"[["null"],[null]]"#), (r#""\u0000""#, r#"[["\"\\u0000\""],[null]]"#)]
    {
        let written =
            postgres_rows(&template, Some(&rows("j", Kind::Json, &[Some(document), None])));
        assert!(
            written.starts_with("SELECT (d.documents->>0)::jsonb AS \"j\" FROM ("),
            "{written}"
        );
        assert!(written.contains(r#"[{"j":null},{"j":null}]"#), "{written}");
        assert!(written.contains(&format!("json_array_elements('{constant}')")), "{written}");
    }
}
