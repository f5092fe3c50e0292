//! Where a database is, whatever its name is made of.

mod common;

use backend_sqlite::SqliteBackend;
use backend_sqlite::SqliteOptions;
use common::*;
use queue_core::*;
use tempfile::TempDir;

/// Characters that mean something in URLs, to SQLite or to a shell, and none in a file's name.
const NAMES: &[&str] = &[
    "with space.db",
    "what?mode=memory",
    "a#b",
    "100%25",
    "%41",
    "größe-日本-😀.db",
    "file:x.db",
    ":memory:",
    "o'brien \"quoted\"",
    "semi;colon&amp",
    "new\nline",
];

#[tokio::test]
async fn a_path_is_the_name_of_the_file() {
    for name in NAMES {
        let folder = TempDir::new().expect("a folder");
        let path = folder.path().join(name);
        let backend = SqliteBackend::open(&path).await.expect("opens");
        backend.migrate().await.expect("migrates");
        let job = job("1");
        backend.enqueue(std::slice::from_ref(&job)).await.expect("stores");
        backend.close().await;
        let files: Vec<_> =
            folder.path().read_dir().expect("a folder").map(|file| file.expect("a file").file_name()).collect();
        assert_eq!(files, [*name], "closed, the file is all there is");
        let backend = SqliteBackend::open(&path).await.expect("opens again");
        assert!(backend.get(job.id).await.expect("reads").is_some(), "{name:?}");
    }
}

#[tokio::test]
async fn a_url_is_percent_decoded() {
    let folder = TempDir::new().expect("a folder");
    let base = folder.path().to_str().expect("UTF-8");
    for (url, file) in [
        (format!("sqlite://{base}/with%20space%3F%23.db"), "with space?#.db"),
        (format!("sqlite:{base}/plain.db?mode=rwc"), "plain.db"),
        (format!("sqlite:{base}/100%"), "100%"),
        (format!("sqlite:{base}/gr%C3%B6%C3%9Fe"), "größe"),
    ] {
        SqliteBackend::connect(&url).await.expect("opens").migrate().await.expect("migrates");
        assert!(folder.path().join(file).is_file(), "{url}");
    }
}

#[tokio::test]
async fn a_file_is_not_created_unless_that_is_allowed() {
    let (_folder, path) = folder();
    let url = format!("sqlite:{}?mode=rw", path.display());
    let error = SqliteBackend::connect(&url).await.expect_err("there is no file");
    assert_eq!((error.kind(), error.certainty()), (ErrorKind::Unavailable, Certainty::NotApplied));
    assert!(!path.exists());
}

#[test]
fn what_is_no_url_is_refused() {
    for url in ["jobs.db", "postgres://host/db", "sqlite:", "sqlite://", "sqlite:a.db?mode=ro", "sqlite:%FF.db"] {
        let error = SqliteOptions::from_url(url).expect_err(url);
        assert_eq!((error.kind(), error.certainty()), (ErrorKind::Invalid, Certainty::NotApplied), "{url}");
    }
}

#[cfg(unix)]
#[tokio::test]
async fn a_path_that_is_no_text_is_refused() {
    use std::os::unix::ffi::OsStrExt;

    for path in [b"\xff".as_slice(), b"a\0b"] {
        let error = SqliteBackend::open(std::ffi::OsStr::from_bytes(path)).await.expect_err("no name for SQLite");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}

#[test]
fn a_prefix_of_sqlites_own_names_is_refused() {
    let prefix: Identifier = "sqlite_x".parse().expect("well-formed");
    assert_eq!(SqliteOptions::memory().table_prefix(prefix).expect_err("is SQLite's").kind(), ErrorKind::Invalid);
}

/// F11.
#[tokio::test]
async fn two_prefixes_are_two_queues() {
    let (_folder, path) = folder();
    let open = async |prefix: &str| {
        let options = SqliteOptions::file(&path).table_prefix(prefix.parse().expect("a prefix")).expect("ours");
        let backend = SqliteBackend::connect_with(options).await.expect("opens");
        backend.migrate().await.expect("migrates");
        backend
    };
    let (one, two) = (open("select").await, open("a").await);
    one.enqueue(&[keyed("k")]).await.expect("stores");
    assert_eq!(two.claim(&request(1)).await.expect("claims"), Claimed::default());
    assert!(matches!(two.enqueue(&[keyed("k")]).await.expect("stores")[..], [Enqueued::New(_)]));
    assert_eq!(one.claim(&request(10)).await.expect("claims").jobs.len(), 1);
}

#[tokio::test]
async fn memory_is_one_database_per_handle() {
    for url in [":memory:", "sqlite::memory:", "sqlite://:memory:"] {
        let one = SqliteBackend::connect(url).await.expect("opens");
        let other = SqliteBackend::connect(url).await.expect("opens");
        one.migrate().await.expect("migrates");
        other.migrate().await.expect("migrates");
        one.enqueue(&[job("1"), job("2")]).await.expect("stores");
        assert!(other.counts().await.expect("counts").is_empty());

        let (first, second) = (one.clone(), one.clone());
        let claims = [first, second].map(|backend| tokio::spawn(async move { claim_one(&backend).await }));
        for claim in claims {
            let job = claim.await.expect("no panic");
            Transitioner::new(&one).apply(&job.execution, &complete("1")).await.expect("settles");
        }
        assert_eq!(one.counts().await.expect("counts")[0].jobs, 2);
    }
}

/// F10, and that nothing needs more than one connection at a time.
#[tokio::test]
async fn an_application_lends_its_pool_of_any_size() {
    for connections in [1, 3] {
        let (_folder, path) = folder();
        let backend = SqliteBackend::from_pool(pool(&path, connections).await).await.expect("a handle");
        backend.migrate().await.expect("migrates");
        let jobs: Vec<_> = (0..50).map(|_| job("1")).collect();
        backend.enqueue(&jobs).await.expect("stores");
        let work = |backend: SqliteBackend| async move {
            let mut done = 0;
            while let Some(job) = backend.claim(&request(1)).await.expect("claims").jobs.pop() {
                let held = Held::of(&job.execution).expect("held");
                assert_eq!(backend.extend_leases(&[held], lease()).await.expect("beats"), [Beat::Extended]);
                let mut decisions = [Decision::new(&job.execution, &complete("1")).expect("legal")];
                Transitioner::new(&backend).submit_all(&mut decisions).await.remove(0).expect("settles");
                done += 1;
            }
            done
        };
        let workers: Vec<_> = (0..4).map(|_| tokio::spawn(work(backend.clone()))).collect();
        let mut done = 0;
        for worker in workers {
            done += worker.await.expect("no panic");
        }
        assert_eq!(done, 50);
    }
}
