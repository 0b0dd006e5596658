"""SQLAlchemy's inspector over tables of several sources. Nothing in it knows of the proxy."""

import sys

from sqlalchemy import MetaData, create_engine, inspect

engine = create_engine(sys.argv[1])
inspector = inspect(engine)
names = set(inspector.get_table_names())
assert {"items", "notes", "moved", "authors", "books"} <= names, names
assert not any(name.startswith("orthodrome") for name in names), names
for table, columns in {
    "items": ["id", "name"],
    "notes": ["id", "body", "state"],
    "moved": ["a", "b"],
    "authors": ["id", "name"],
    "books": ["id", "title", "price", "author"],
}.items():
    found = [column["name"] for column in inspector.get_columns(table)]
    assert found == columns, (table, found)
    assert inspector.has_table(table), table
assert not inspector.has_table("nowhere")
price = next(c for c in inspector.get_columns("books") if c["name"] == "price")
assert (price["type"].precision, price["type"].scale) == (10, 2), price
for table in ("items", "notes", "authors", "books"):
    assert inspector.get_pk_constraint(table)["constrained_columns"] == ["id"], table
references = inspector.get_foreign_keys("books")
assert [(k["referred_table"], k["referred_columns"]) for k in references] == [("authors", ["id"])], references
assert "books_by_title" in {index["name"] for index in inspector.get_indexes("books")}
metadata = MetaData()
metadata.reflect(engine)
assert "books" in metadata.tables
print("ok", engine.dialect.driver)
