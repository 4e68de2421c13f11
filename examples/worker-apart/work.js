/** The definition that both processes have. The web process needs it to accept, the worker to run. */
import { createIntake, postgres } from 'spillway'
import Type from 'typebox'

export async function openIntake(role) {
  const intake = await createIntake({ store: postgres({ url: process.env.DATABASE_URL }), role })
  const resize = intake.define('images.resize', {
    body: Type.Object({ image: Type.String() }),
    // At most two at once for an image server, over all workers.
    lane: { key: () => 'image-server', concurrency: 2 },
    run: async ({ image }) => ({ image, resizedBy: process.pid }),
  })
  return { intake, resize }
}
