/** Runs and accepts nothing. Start as many as you need. */
import { openIntake } from './work.js'

const { intake } = await openIntake('work')
process.send?.('ready')
process.once('SIGTERM', async () => {
  await intake.close()
  process.disconnect?.()
})
