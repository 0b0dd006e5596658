"""SQLAlchemy's core and ORM with a schema of their own: generated keys, nested transactions, reflection and cursors. Nothing in it
knows of the proxy."""

import sys

from sqlalchemy import ForeignKey, String, create_engine, func, inspect, select, text
from sqlalchemy.exc import IntegrityError, ProgrammingError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

address = sys.argv[1]
engine = create_engine(address)


class Base(DeclarativeBase):
    pass


class Author(Base):
    __tablename__ = "orm_authors"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(50), unique=True)
    books: Mapped[list["Book"]] = relationship(back_populates="author", order_by="Book.id")


class Book(Base):
    __tablename__ = "orm_books"
    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(String(100))
    author_id: Mapped[int] = mapped_column(ForeignKey("orm_authors.id"))
    author: Mapped[Author] = relationship(back_populates="books")


Base.metadata.drop_all(engine)
Base.metadata.create_all(engine)

# Keys are generated, and known at once.
with Session(engine) as session, session.begin():
    ada = Author(name="Ada", books=[Book(title="Notes"), Book(title="Letters")])
    session.add(ada)
    session.flush()
    assert ada.id is not None and all(book.id for book in ada.books)
    assert len({book.id for book in ada.books}) == 2

# A failure in a nested transaction undoes only that.
with Session(engine) as session, session.begin():
    session.add(Author(name="Grace"))
    session.flush()
    try:
        with session.begin_nested():
            session.add(Author(name="Alan"))
            session.flush()
            session.add(Author(name="Ada"))
            session.flush()
        raise SystemExit("a duplicate was taken")
    except IntegrityError:
        pass
    with session.begin_nested():
        session.add(Author(name="Edsger"))
        with session.begin_nested() as inner:
            session.add(Author(name="Nobody"))
            session.flush()
            inner.rollback()
with Session(engine) as session:
    names = session.scalars(select(Author.name).order_by(Author.name)).all()
    assert names == ["Ada", "Edsger", "Grace"], names

# Core, with savepoints of its own.
with engine.connect() as connection:
    with connection.begin():
        outer = connection.execute(Author.__table__.insert().values(name="Barbara"))
        assert outer.inserted_primary_key[0] is not None
        savepoint = connection.begin_nested()
        connection.execute(Author.__table__.insert().values(name="Lost"))
        savepoint.rollback()
        with connection.begin_nested():
            connection.execute(Author.__table__.insert(), [{"name": f"n{n}"} for n in range(20)])
    with connection.begin():
        count = connection.execute(select(func.count()).select_from(Author.__table__)).scalar_one()
        assert count == 24, count
        ids = connection.execute(select(Author.id)).scalars().all()
        assert len(set(ids)) == 24

# Joins, and rows that come piece by piece.
with Session(engine) as session:
    rows = session.execute(select(Author.name, Book.title).join(Book).order_by(Book.id)).all()
    assert [tuple(row) for row in rows] == [("Ada", "Notes"), ("Ada", "Letters")], rows
    streamed = session.execute(
        select(Author.name).order_by(Author.id), execution_options={"yield_per": 5}
    )
    assert len(list(streamed)) == 24

# Reflection.
inspector = inspect(engine)
names = set(inspector.get_table_names())
assert {"orm_authors", "orm_books"} <= names and not any(n.startswith("orthodrome") for n in names), names
assert [c["name"] for c in inspector.get_columns("orm_books")] == ["id", "title", "author_id"]
assert inspector.get_pk_constraint("orm_books")["constrained_columns"] == ["id"]
assert [k["referred_table"] for k in inspector.get_foreign_keys("orm_books")] == ["orm_authors"]

# An error names what is wrong.
with engine.connect() as connection:
    try:
        connection.execute(text("SELECT id FORM orm_books WHERE ("))
        raise SystemExit("nonsense was taken")
    except ProgrammingError as error:
        assert "syntax" in str(error), error

Base.metadata.drop_all(engine)
assert not {"orm_authors", "orm_books"} & set(inspect(engine).get_table_names())
print("ok", engine.dialect.driver)
