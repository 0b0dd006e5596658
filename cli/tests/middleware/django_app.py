"""Django with a model of its own: schema, generated keys, `atomic` in `atomic`, locks and cursors. Nothing in it knows of the
proxy."""

import sys

engine, port, user, password = sys.argv[1:]
if engine == "mysql":
    import pymysql

    pymysql.version_info = (2, 2, 1, "final", 0)
    pymysql.install_as_MySQLdb()

import types

import django
from django.conf import settings

# An application that has no files.
news = types.ModuleType("news")
news.__path__ = ["/nonexistent"]
sys.modules["news"] = news

settings.configure(
    DATABASES={
        "default": {
            "ENGINE": f"django.db.backends.{engine}",
            "HOST": "127.0.0.1",
            "PORT": port,
            "USER": user,
            "PASSWORD": password,
            "NAME": "bank",
        }
    },
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "news"],
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    USE_TZ=True,
)
django.setup()

from django.db import IntegrityError, connection, models, transaction
from django.db.models import Count, F


class Reporter(models.Model):
    name = models.CharField(max_length=50, unique=True)
    score = models.IntegerField(default=0)

    class Meta:
        app_label = "news"


class Article(models.Model):
    title = models.CharField(max_length=100)
    reporter = models.ForeignKey(Reporter, on_delete=models.CASCADE)

    class Meta:
        app_label = "news"


tables = connection.introspection.table_names()
with connection.schema_editor() as editor:
    for model in (Article, Reporter):
        if model._meta.db_table in tables:
            editor.delete_model(model)
with connection.schema_editor() as editor:
    editor.create_model(Reporter)
    editor.create_model(Article)

tintin = Reporter.objects.create(name="Tintin")
assert tintin.pk is not None
with transaction.atomic():
    Reporter.objects.create(name="Haddock")
    try:
        with transaction.atomic():
            Reporter.objects.create(name="Calculus")
            Reporter.objects.create(name="Tintin")
        raise SystemExit("a duplicate was taken")
    except IntegrityError:
        pass
    with transaction.atomic():
        Reporter.objects.create(name="Castafiore")
    sid = transaction.savepoint()
    Reporter.objects.filter(name="Tintin").update(score=99)
    transaction.savepoint_rollback(sid)
    sid = transaction.savepoint()
    Reporter.objects.filter(name="Tintin").update(score=F("score") + 7)
    transaction.savepoint_commit(sid)
names = list(Reporter.objects.order_by("name").values_list("name", flat=True))
assert names == ["Castafiore", "Haddock", "Tintin"], names
assert Reporter.objects.get(name="Tintin").score == 7


class Stop(Exception):
    pass


try:
    with transaction.atomic():
        Reporter.objects.all().delete()
        raise Stop
except Stop:
    pass
assert Reporter.objects.count() == 3

# `get_or_create` relies on a savepoint.
with transaction.atomic():
    _, is_new = Reporter.objects.get_or_create(name="Tintin")
    assert not is_new
    snowy, is_new = Reporter.objects.get_or_create(name="Snowy")
    assert is_new and snowy.pk is not None

made = Reporter.objects.bulk_create([Reporter(name=f"r{n}") for n in range(30)])
assert Reporter.objects.count() == 34
assert len(set(Reporter.objects.values_list("pk", flat=True))) == 34
Article.objects.create(title="a", reporter=tintin)
Article.objects.create(title="b", reporter=tintin)
counted = Reporter.objects.annotate(n=Count("article")).get(pk=tintin.pk)
assert counted.n == 2
with transaction.atomic():
    locked = Reporter.objects.select_for_update().get(pk=tintin.pk)
    locked.score += 1
    locked.save()
assert Reporter.objects.get(pk=tintin.pk).score == 8
assert len(list(Reporter.objects.order_by("pk").iterator(chunk_size=10))) == 34
ids = list(range(1, 400))
assert Reporter.objects.filter(pk__in=ids).count() == 34
assert Article.objects.select_related("reporter").get(title="a").reporter.name == "Tintin"
tintin.delete()
assert Article.objects.count() == 0

with connection.cursor() as cursor:
    fields = [c.name for c in connection.introspection.get_table_description(cursor, "news_reporter")]
    assert fields == ["id", "name", "score"], fields
with connection.schema_editor() as editor:
    editor.delete_model(Article)
    editor.delete_model(Reporter)
print("ok", engine)
