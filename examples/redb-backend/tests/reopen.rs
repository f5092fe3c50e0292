//! What is stored outlives the process: here, the database that had the file open.

use queue_core::Backend;
use queue_core::ClaimRequest;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Json;
use queue_core::Lease;
use queue_core::Limit;
use queue_core::Name;
use queue_core::NewJob;
use queue_core::WorkerId;
use redb_backend::RedbBackend;

#[tokio::test]
async fn jobs_survive_closing_and_reopening() -> Result<(), Box<dyn std::error::Error>> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("queue.redb");
    let (queue, kind) = (Name::try_from("mail")?, Name::try_from("welcome")?);
    let jobs = [(); 2].map(|()| NewJob::new(queue.clone(), kind.clone(), Json::null()));
    let worker = WorkerId::new(&Name::try_from("test")?);
    let claim = ClaimRequest::new(queue, [kind], worker, Lease::from_millis(60_000)?, Limit::new(1)?)?;

    let backend = RedbBackend::open(&path).await?;
    backend.enqueue(&jobs).await?;
    let claimed = backend.claim(&claim).await?.jobs;
    let second = RedbBackend::open(&path).await.err().map(|error: Error| error.kind());
    assert_eq!(second, Some(ErrorKind::Unavailable), "the file is open already");
    drop(backend);

    let backend = RedbBackend::open(&path).await?;
    assert_eq!(backend.get(claimed[0].id()).await?.as_ref(), Some(&claimed[0]));
    let rest = backend.claim(&claim).await?.jobs;
    assert_eq!(rest.iter().map(|job| job.id()).collect::<Vec<_>>(), [jobs[1].id]);
    Ok(())
}
